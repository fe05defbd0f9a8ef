"""per_rank: functions on the values of each rank, with uneven shards, nested values, and functions that fail, write or disagree."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.errors import FxshardError, LayoutError, OptionError, RunError
from fxshard.mesh.mesh import Mesh
from tests.reference_shards import assert_is_sharded

MESH = Mesh({"a": 2, "b": 3})
per_rank, shard = fxshard.simulate.per_rank, fxshard.simulate.shard


def test_a_function_sees_what_each_rank_holds() -> None:
    """Seven rows on three ranks are shards of 3, 3 and 1."""
    x = torch.arange(14.0).view(7, 2)
    rows = per_rank(lambda local: local.shape[0])(shard(x, "RS(0)", MESH))
    assert list(rows) == [3, 3, 1, 3, 3, 1]
    assert rows[1, 2] == rows[5] == 1
    doubled = per_rank(lambda local, *, by: local * by)(shard(x, "RS(0)", MESH), by=2)
    assert torch.equal(doubled.whole("RS(0)", (7, 2)), 2 * x)


@pytest.mark.parametrize("layout", ["S(0)R", "S(1)S(0)", "RP", "S(0)S(0)"])
def test_shards_are_those_of_the_layout(layout: str) -> None:
    x = torch.randn(7, 5)
    values = shard(x, layout, MESH)
    assert_is_sharded(x, dict(zip(MESH.coordinates(), values, strict=True)), fxshard.Layout.parse(layout), MESH.shape)
    torch.testing.assert_close(values.whole(layout, (7, 5)), x)


def test_structures_and_coordinates() -> None:
    @per_rank
    def row_sums(at: tuple[int, int], local: dict[str, torch.Tensor]) -> dict[str, object]:
        return {"sum": local["x"].sum(0), "at": at[0] * 10 + at[1], "none": None}

    x = torch.randn(7, 5)
    result = row_sums(fxshard.simulate.coordinates(MESH), {"x": shard(x, "S(0)R", MESH)})
    assert list(result["at"]) == [0, 1, 2, 10, 11, 12]
    torch.testing.assert_close(result["sum"].whole("PR", (5,)), 3 * x.sum(0) / 3)
    assert row_sums((3, 4), {"x": torch.ones(2, 2)})["at"] == 34, "called with ordinary values it is the function itself"
    assert row_sums.__name__ == "row_sums"


def test_each_ranks_part_of_a_simulation() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 6, bias=False).double(), torch.randn(5, 4, dtype=torch.float64)
    plan = fxshard.plan(model, (x,), MESH, pins={"weight": "S(0)R"}, output_layouts="S(1)S(0)")
    result = fxshard.simulate(model, (x,), plan)
    assert {name: len(values) for name, values in result.ranks.items()} == {"outputs[0]": 6, "weight": 6}
    assert [tuple(v.shape) for v in result.ranks["outputs[0]"]] == [(2, 3), (2, 3), (1, 3)] * 2
    norms = per_rank(lambda g: (g * g).sum())(result.ranks["weight"])
    torch.testing.assert_close(norms[0, 0] + norms[1, 0], result.grads["weight"].square().sum())


def fails(x: torch.Tensor) -> torch.Tensor:
    return x.view(3, 2)


def writes(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fails, r"fails raised RuntimeError on rank 2: (.|\n)*at \(0, 2\)"),
        (writes, "writes wrote into an argument on rank 0"),
        (lambda x: [x] * x.shape[0], r"returned .* on rank 2, .* on rank 0"),
    ],
)
def test_functions_that_are_refused(function: object, said: str) -> None:
    with pytest.raises(RunError, match=said) as error:
        per_rank(function)(shard(torch.zeros(7, 2), "RS(0)", MESH))  # type: ignore[arg-type]  # functions of several types
    assert error.value.remedy


def test_impossible_arguments() -> None:
    values = shard(torch.zeros(7, 2), "RS(0)", MESH)
    for kind, said, call in (
        (LayoutError, "2 placements, the mesh has 2 axes|dim 2 .* is out of range", lambda: shard(torch.zeros(7, 2), "RS(2)", MESH)),
        (LayoutError, "cannot read layout", lambda: shard(torch.zeros(7, 2), "X", MESH)),
        (LayoutError, "the layout is an int", lambda: shard(torch.zeros(7, 2), 3, MESH)),  # type: ignore[arg-type]  # the wrong type is what is tested
        (OptionError, "shard was given a list", lambda: shard([1], "RR", MESH)),  # type: ignore[arg-type]  # the wrong type is what is tested
        (OptionError, "has no rank 6", lambda: values[6]),
        (OptionError, r"has no rank \(2, 0\)", lambda: values[2, 0]),
        (OptionError, "given an int", lambda: per_rank(3)),  # type: ignore[arg-type]  # the wrong type is what is tested
        (OptionError, "has 65 ranks", lambda: shard(torch.zeros(7, 2), "R", Mesh({"a": 65}))),
        (RunError, r"rank 0 holds \(3, 2\), in layout S\(0\)R of \(7, 2\) it would be \(4, 2\)", lambda: values.whole("S(0)R", (7, 2))),
        (
            RunError,
            "values of mesh a=2,b=3 and of mesh a=6",
            lambda: per_rank(torch.add)(values, shard(torch.zeros(7), "R", Mesh({"a": 6}))),
        ),
    ):
        with pytest.raises(kind, match=said) as error:  # type: ignore[var-annotated]  # one of several kinds
            call()
        assert isinstance(error.value, FxshardError)
        assert error.value.remedy
