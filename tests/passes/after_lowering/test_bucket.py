"""Pieces of a collective that chunk cut: bucket sends none of them together again, and sends short collectives with the last one."""

from __future__ import annotations

import torch
from passes.round_hardware import RATES
from torch import nn

from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.bucket import bucket
from fxshard.passes.after_lowering.chunk import Choice, chunk, cut_program
from fxshard.passes.after_lowering.schedule import predicted, schedule
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.mixture import Mixture


class LongAndShort(nn.Module):
    """Two products; the gradient of the large weight is computed first, that of the small one right after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(width, width, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x[:, :8]) + self.large(x)


def data_parallel(hardware: str | Hardware, width: int = 2048, rows: int = 8192) -> ShardedProgram:
    """A step with one all-reduce for each of the two gradients."""
    graph = trace(LongAndShort(width).to("meta"), (torch.empty(rows, width, device="meta"),))
    request = Request(input_layouts="S(0)", output_layouts="S(0)", pins={"large.weight": "R", "small.weight": "R"})
    program = lower(graph, plan_graph(graph, Mesh({"dp": 4}, hardware=hardware), request))
    assert [c.shape for c in program.collectives] == [(width, width), (width, 8)]
    return schedule(program)


def test_a_short_one_goes_with_the_last_piece() -> None:
    """Sent with the first piece, it would delay that; sent alone, it costs one more launch."""
    cut = chunk(data_parallel(RATES))
    pieces = len(cut.collectives) - 1
    assert pieces > 1
    merged = bucket(cut)
    assert [len(c.serves) for c in merged.collectives] == [1] * (pieces - 1) + [2]
    assert predicted(merged).total < predicted(cut).total


def test_pieces_stay_apart() -> None:
    """Even where nothing overlaps and each launch costs more than sending."""
    before = data_parallel("cpu", width=16, rows=64)
    assert len(bucket(before).collectives) == 1
    merged = bucket(cut_program(before, {0: Choice(0, 2), 1: Choice(0, 2)}))
    assert [len(set(c.serves)) for c in merged.collectives] == [len(c.serves) for c in merged.collectives] == [1, 2, 1]


class Labelled(nn.Module):
    """Integers that change their layout, beside the numbers of rows for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(6, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mixture(x), labels.t()


def test_only_all_to_alls_of_one_form_are_merged() -> None:
    """Those of labels send one row to each rank, those of numbers of rows one for each of its experts."""
    model = Labelled().double()
    args = (torch.rand(8, 8, dtype=torch.float64), torch.arange(32).view(8, 4))
    graph = trace(model, args, train=False)
    pins = {"mixture.up": "S(0)", "mixture.down": "S(0)", "to_experts*": ("P(experts)", "P(experts)")}
    request = Request(pins=pins, input_layouts="S(0)", output_layouts={"outputs[0]": "S(0)", "outputs[1]": "S(0)"})
    program = bucket(lower(graph, plan_graph(graph, Mesh({"ep": 2}, hardware="cpu"), request)))
    found = simulate_program(program, program_values(program, model, args, {}))
    assert_equal_to_one_device(found, one_device(model, args, {}, train=False), 1e-9)
