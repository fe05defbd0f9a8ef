"""torch's own redistribution planners, greedy and min-cost, never send fewer bytes than fxshard."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bench.redistribution.compare import compare
from bench.redistribution.torchs import fake_ranks, sent
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh, parse_mesh

L = Layout.parse
CASES = [
    ("a=4", (8, 4)),
    ("a=4", (6, 3)),
    ("a=2,b=2", (8,)),
    ("a=2,b=2", (8, 4)),
    ("a=2,b=2", (5, 3)),
    ("a=2,b=3", (7, 5)),
    ("a=2,b=2", (4, 6, 5)),
    ("a=2,b=2,c=2", (16, 8)),
    ("a=2,b=2,c=2", (9, 3)),
]


def check(axes: str, shape: tuple[int, ...], most: int | None) -> None:
    found = compare(parse_mesh(axes), shape, most, ("sum", "avg"))
    assert len(found) >= min(most or 12, 12)
    for pair in found:
        for name, theirs in pair.torchs.items():
            assert pair.ours <= theirs.bytes <= theirs.as_gathered, f"{pair.ends} of {shape} on {axes}: {name} sends {theirs}"


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_a_sample_of_pairs(axes: str, shape: tuple[int, ...]) -> None:
    check(axes, shape, 25 if axes.count("=") == 3 else 120)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_all_pairs(axes: str, shape: tuple[int, ...]) -> None:
    check(axes, shape, None)


@pytest.mark.parametrize(
    ("source", "target", "greedy", "least"),
    [
        ("S(0)S(0)", "S(1)S(1)", 1 / 4 + 1 / 4, 1 / 4 + 1 / 2),
        ("PP", "RR", 2, 2),
        ("S(0)R", "S(1)R", 1 / 4, 1 / 2),
        ("RS(0)", "RR", 1 / 2, 1 / 2),
    ],
)
def test_bytes_of_torchs_planners(source: str, target: str, greedy: float, least: float) -> None:
    """As fractions of the tensor, computed by hand on 2 x 2 ranks from the paths that torch takes."""
    mesh, whole = Mesh({"a": 2, "b": 2}), 8 * 8 * 4
    with fake_ranks(mesh) as ranks:
        both = [sent(ranks, L(source), L(target), (8, 8), 4, name) for name in ("greedy", "min-cost")]
    assert [one and one.bytes / whole for one in both] == [greedy, least]
    assert not dist.is_initialized()
