"""Equal calls and redistributions are lowered once and then replayed; the graph is the same as if each were lowered by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from passes.any_size import traced
from torch import fx, nn
from zoo import gpt2, llama

from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.shapes import DynamicDim
from fxshard.testing.random_plan import random_graph_plan


class Typed(nn.Module):
    """Calls that look equal but differ: by 1 and 1.0, or by one tensor twice and two tensors; and draws, which read offsets of shards."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = (x + 1) + 1.0 + (y + 1.0) + (y + 1)
        x = x * y + x * x + y * y + y * x
        return nn.functional.dropout(x) + nn.functional.dropout(x) + nn.functional.dropout(y)


def nodes_of(program: ShardedProgram) -> list[Any]:
    return [[_described(n) for n in module.graph.nodes] for module in program.modules.values()]


def _described(node: fx.Node) -> tuple[Any, ...]:
    value, meta = node.meta.get("val"), {k: v for k, v in node.meta.items() if k != "val"}
    several = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
    values = [(str(v.shape), str(v.stride()), v.dtype, str(v.device)) if isinstance(v, torch.Tensor) else str(v) for v in several]
    return node.op, node.name, str(node.target), repr(node.args), repr(node.kwargs), [u.name for u in node.users], values, meta


def without_replay(self: LocalGraph, key: Hashable, objects: Any, operands: Sequence[fx.Node], make: Callable[[], Any]) -> Any:
    return make()


class Convolutions(nn.Module):
    """Their backward operators leave out some of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv1d(4, 4, 3, bias=False), nn.Conv1d(4, 4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


ROWS = (DynamicDim("rows", (("args[0]", 0), ("args[1]", 0)), 4, uneven=True),)
CASES: dict[str, Callable[[], Annotated]] = {
    "llama": lambda: annotate(trace(*llama()), parse_mesh("dp=2,tp=2")),
    "uneven": lambda: annotate(trace(*llama(5)), parse_mesh("dp=2,tp=2")),
    "gpt2": lambda: annotate(trace(*gpt2(vocabulary=64)), parse_mesh("a=3")),
    "masked": lambda: annotate(trace(Convolutions(), (torch.randn(4, 4, 9),)), parse_mesh("a=2")),
    "typed": lambda: annotate(trace(Typed(), (torch.randn(4, 6), torch.randn(4, 6))), parse_mesh("a=2,b=2")),
    "llama of any size": lambda: annotate(traced("one layer", 12, 12)[1], parse_mesh("dp=2,tp=2")),
    "llama of any size, odd ones too": lambda: annotate(traced("one layer", 12, 12, uneven=True)[1], parse_mesh("a=3")),
    "perceptron of any size, odd ones too": lambda: annotate(traced("perceptron", 12, 12, uneven=True)[1], parse_mesh("a=3")),
    "typed, of any size": lambda: annotate(trace(Typed(), (torch.randn(4, 6), torch.randn(4, 6)), dynamic=ROWS), parse_mesh("a=3")),
}


SLOW = "llama of any size, odd ones too"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case == SLOW else []) for case in CASES])
def test_replayed_graphs_equal_those_lowered_call_by_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    annotated = CASES[case]()
    plan = random_graph_plan(annotated, 1, frugal=[*CASES].index(case) % 2 == 0)
    program = lower(annotated.graph, plan)
    monkeypatch.setattr(LocalGraph, "record_or_replay", without_replay)
    by_itself = lower(annotated.graph, plan)
    assert nodes_of(program) == nodes_of(by_itself)
    assert program.collectives == by_itself.collectives
    assert list(map(str, program.guards)) == list(map(str, by_itself.guards))


def test_equal_layers_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of four equal steps is recorded, a product and a relu. That its operand is an input makes no difference."""
    asked = []
    once = LocalGraph.record_or_replay

    def counted(self: LocalGraph, key: Hashable, objects: Any, operands: Sequence[fx.Node], make: Callable[[], Any]) -> Any:
        return once(self, key, objects, operands, lambda: asked.append(key) or make())

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = (x @ x).relu()
            return x

    annotated = annotate(trace(Steps(), (torch.randn(4, 4),)), parse_mesh("a=2"))
    plan = random_graph_plan(annotated, None)
    monkeypatch.setattr(LocalGraph, "record_or_replay", counted)
    lower(annotated.graph, plan)
    assert len(asked) == 2


def test_replayed_nodes_read_their_own_operands() -> None:
    local = LocalGraph(parse_mesh("a=2"), (0,))
    aten, value = torch.ops.aten, torch.empty(4, 4, device="meta")
    x, y, z = (local.placeholder(name, (4, 4), value) for name in "xyz")

    def made(a: fx.Node, b: fx.Node) -> Callable[[], Any]:
        return lambda: (local.emit(aten.cat.default, [a, local.emit(aten.sub.Tensor, b, local.offset(8, (0,)))]), None, a)

    first = local.record_or_replay("key", None, [x, y], made(x, y))
    again = local.record_or_replay("key", None, [y, z], made(x, y))
    both = local.record_or_replay("key", None, [z, z], made(z, z))
    for (joined, nothing, given), (a, b) in zip((first, again, both), ((x, y), (y, z), (z, z)), strict=True):
        taken = joined.args[0][1]
        assert nothing is None and given is a and joined.args[0][0] is a and taken.args[0] is b
        assert joined.meta["val"].shape == (8, 4) and taken.args[1] is first[0].args[0][1].args[1]
    assert len({joined.name for joined, _, _ in (first, again, both)}) == 3
