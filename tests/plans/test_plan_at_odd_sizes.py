"""plan.at at odd sizes and at 1: it answers where the plan runs, and otherwise names the node that cannot run and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import SizesError

RANKS, WIDTH = 4, 16
SIZES = ((4, 8), (4, 7), (3, 8), (5, 3), (1, 8), (8, 1), (1, 1))


class Flat(nn.Module):
    """Flattens batch and length. The shards of an uneven batch are not the shards of the flattened dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)).flatten(0, 1)).view(x.shape)


def inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, seq, WIDTH, dtype=torch.float64),)


def plan(model: nn.Module, cut: str, **options: object) -> fxshard.ShardingPlan:
    dims = {"args[0]": {0: "batch", 1: "seq"}}
    mesh = fxshard.Mesh({"a": RANKS}, hardware="h100")
    return fxshard.plan(model, inputs(4, 8), mesh, cache=False, dynamic_shapes=dims, input_layouts=cut, **options)


@pytest.mark.parametrize(("cut", "returned", "count"), [("S(0)", "S(0)", 4), ("S(1)", "R", 0)])
def test_it_answers_where_it_runs(cut: str, returned: str, count: int) -> None:
    """The simulator decides where the plan runs. Results are compared with one device."""
    model = Flat().double()
    made, refused = plan(model, cut, output_layouts=returned), 0
    for batch, seq in SIZES:
        args = inputs(batch, seq)
        try:
            found = fxshard.simulate(model, args, made)
        except SizesError as error:
            refused += 1
            with pytest.raises(SizesError, match=f"not legal at batch={batch}, seq={seq}: .* cannot run as") as also:
                made.at(batch=batch, seq=seq)
            assert str(also.value) == str(error) and ".view(x.shape)" in str(error) and "parallelize" in str(error)
            continue
        torch.testing.assert_close(found.outputs, model(*args), rtol=1e-9, atol=1e-9)
        at = made.at(batch=batch, seq=seq)
        assert at.sizes == {"batch": batch, "seq": seq} and at.objective >= at.lower_bound > 0
    assert refused == count


@pytest.mark.parametrize("seq", [8, 7, 5, 1])
def test_bytes_at_ceil_sizes(seq: int) -> None:
    """By hand: a gather on four ranks moves three shards of ceil(seq / 4) rows for each rank."""
    made = plan(nn.Linear(WIDTH, 32, bias=False).double(), "S(1)", output_layouts="R", objective="communication", train=False)
    assert made.at(seq=seq).objective == (RANKS - 1) * 4 * -(-seq // RANKS) * min(WIDTH, 32) * 8


def test_an_output_dim_of_size_1_may_be_sharded() -> None:
    """One rank has the element, the others have none."""
    made = plan(Flat().double(), "S(1)", output_layouts="S(1)")
    assert made.at(seq=2).regret >= 0 and made.at(seq=1).regret >= 0
