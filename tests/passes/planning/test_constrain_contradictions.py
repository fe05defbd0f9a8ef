"""Contradictory constraints are reported as a minimal set, each as the user wrote it, with one place."""

from __future__ import annotations

from typing import Any

import pytest
from passes.constrained import MESH, PAIR, planned
from torch.distributed.tensor import Shard

from fxshard import Communication, Equal, Forbid, Pin
from fxshard.errors import ConstraintError, LayoutError, OptionError
from fxshard.mesh.mesh import Mesh

BESIDE = [Pin("down.*", {"dp": Shard(0)}), Forbid("silu", "S(0)R"), Equal("*.bias")]
"""Constraints that are part of no contradiction."""


def refused(*constraints: Any, mesh: Mesh = MESH, **request: Any) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        planned(mesh, constraints=[*BESIDE[: 0 if mesh is PAIR else None], *constraints], **request)
    assert caught.value.where and caught.value.remedy
    return caught.value


def test_two_constraints_on_one_value() -> None:
    error = refused(Forbid("up.weight", "S(0)", axis="tp"), pins={"up.weight": "*S(0)"})
    assert error.what == "these constraints cannot hold together: pins['up.weight']='*S(0)'; Forbid('up.weight', 'S(0)', axis='tp')"
    assert error.where == "parameter up.weight"


def test_equal_values_with_different_pins() -> None:
    error = refused(Equal("*.weight"), Pin("up.weight", "RS(0)"), Forbid("embed.weight", {"tp": Shard(0)}))
    expected = "Pin('up.weight', 'RS(0)'); Forbid('embed.weight', {tp: S(0)}); Equal('*.weight')"
    assert error.what == f"these constraints cannot hold together: {expected}"
    assert "parameter up.weight" in str(error.where)


def test_a_glob_is_named_with_one_place() -> None:
    """``up.*`` contradicts the other two pins, each in another parameter; one pin and one parameter are named."""
    error = refused(Pin("up.*", "RS(0)"), Pin("*.weight", "RR"), Pin("*.bias", "RR"))
    said, places = error.what.partition(": ")[2], str(error.where).split("; ")
    assert set(said.split("; ")) in ({"Pin('up.*', 'RS(0)')", f"Pin('*.{kind}', 'RR')"} for kind in ("weight", "bias"))
    assert len(places) == 1


def test_a_limit_on_communication_names_what_needs_more() -> None:
    """It names the sharded input and the least bytes found. Without the limit, or without this layout, there is a plan."""
    limit, cut, others = Communication("tp", at_most=0), {"args[1]": "*S(0)"}, {"args[0]": "S(1)*"}
    error = refused(limit, input_layouts=cut | others, output_layouts="R*")
    assert error.what == f"these constraints cannot hold together: input_layouts[args[1]]='*S(0)'; {limit}"
    assert error.where == "input args[1]" and str(error.remedy).startswith("the least found is ")
    planned(constraints=[*BESIDE, limit], input_layouts=others, output_layouts="R*")
    planned(constraints=BESIDE, input_layouts=cut | others, output_layouts="R*")


def test_equality_is_transitive() -> None:
    """a = b and b = c, but a and c may not be equal: all four constraints are named."""
    chain = [Equal("args[1]", "outputs[1]"), Equal("outputs[1]", "down"), Pin("args[1]", "RS(0)"), Forbid("down", "RS(0)")]
    error = refused(*chain)
    assert set(error.what.partition(": ")[2].split("; ")) == set(map(str, chain))


def test_everything_forbidden() -> None:
    """A pattern that is free on every axis means any layout."""
    error = refused(Forbid("up.weight", "*"), mesh=PAIR)
    assert error.what == "Forbid('up.weight', '*') cannot hold: up_weight (an input) always gives it"
    error = refused(*(Forbid("silu", text) for text in ("R", "S(0)", "S(1)", "S(2)")), mesh=PAIR)
    assert error.what.count("Forbid") == 4 and "constrained.py" in str(error.where)


@pytest.mark.parametrize(
    ("constraint", "said", "remedy"),
    [
        (Pin("up.weight", "R"), "has 1 placement, the mesh has 2 axes", "one placement per mesh axis"),
        (Forbid("up.weight", "S(2)", axis="tp"), "dim 2 in S(2) is out of range", "0 to 1"),
        (Forbid("up.weight", "RS(0)", axis="tp"), "'RS(0)' is not a placement on axis 'tp'", "give one placement"),
        (Forbid("up.weight", "S(0)", axis="pt"), "no axis 'pt'", "dp, tp"),
        (Communication("pp", at_most=1), "no axis 'pp'", "dp, tp"),
    ],
    ids=str,
)
def test_invalid_layouts_and_axes(constraint: Any, said: str, remedy: str) -> None:
    with pytest.raises(LayoutError) as caught:
        planned(constraints=[constraint])
    assert said in caught.value.what and remedy in str(caught.value.remedy) and str(constraint) in str(caught.value.where)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pin(3, "R"), "Pin needs a name or glob, as text, not 3"),  # type: ignore[arg-type]
        (lambda: Equal(), "Equal needs a name or glob"),
        (lambda: Equal(["a", "b"]), "Equal needs a name or glob, as text, not ['a', 'b']"),  # type: ignore[arg-type]
        (lambda: Forbid("", "R"), "Forbid needs a name or glob"),
        (lambda: Communication(0, 1), "Communication needs the name of a mesh axis, as text, not 0"),  # type: ignore[arg-type]
        (lambda: Communication("dp", at_most=-1), "cannot read at_most=-1"),
        (lambda: Communication("dp", at_most="1 parsec"), "cannot read '1 parsec' as a number of bytes"),
        (lambda: Communication("dp", at_most=float("inf")), "cannot read at_most=inf"),
    ],
)
def test_invalid_constraints_are_refused_when_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert said in caught.value.what and caught.value.where and caught.value.remedy
