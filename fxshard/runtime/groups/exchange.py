"""Reduce-scatters on backends that have none of their own: gloo's is an all-reduce of which each rank keeps its part.

There each rank sends every other its block, an all-to-all, and adds up what comes: half of the bytes, and of the time. Decision 0031.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from fxshard.program.sharded_program import ProgramCollective

c10d = torch.ops._c10d_functional
WITHOUT = frozenset({"gloo"})
"""Backends whose reduce-scatter sends what an all-reduce sends."""
ADD_UP: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "product": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.mean(0),
}
"""Reductions over dim 0; sums of bfloat16 and float16 are added up in float32 and rounded once."""


def kind_on(backend: str, kind: str) -> str:
    """What a collective of a program is issued as on ``backend``."""
    return "all_to_all" if kind == "reduce_scatter" and backend in WITHOUT else kind


def issued_on(backends: Mapping[str, str], one: ProgramCollective) -> ProgramCollective:
    """``one`` as a rank issues it; ``backends``: the backend's name by axis."""
    return replace(one, kind=kind_on(backends[one.axis], one.kind))


def add_up(arrived: torch.Tensor, op: str, ranks: int) -> torch.Tensor:
    """The reduction ``op`` of the blocks that came, one a rank, one behind the other on dim 0."""
    return ADD_UP[op](arrived.view(ranks, arrived.shape[0] // ranks, *arrived.shape[1:]))


def reduce_scatter(buffer: torch.Tensor, op: str, ranks: int, group: str, backend: str) -> torch.Tensor:
    """This rank's block of the reduction of all ranks' ``buffer``, as a program does it on ``backend``."""
    if kind_on(backend, "reduce_scatter") == "all_to_all":
        arrived = c10d.all_to_all_single.default(buffer, *_splits(buffer, ranks), group)
        return add_up(c10d.wait_tensor.default(arrived), op, ranks)
    return c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(buffer, op, ranks, group))


def exchange_instead(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a reduce-scatter, in place: what is awaited is added up right behind the wait, which stays where it is."""
    buffer, op, ranks, group = node.args
    with graph.inserting_before(node):
        exchange = graph.call_function(c10d.all_to_all_single.default, (buffer, *_splits(buffer.meta["val"], ranks), group))
    exchange.meta = {**node.meta, "val": buffer.meta["val"]}
    for wait in list(node.users):
        wait.replace_input_with(node, exchange)
        with graph.inserting_after(wait):
            total = graph.call_function(add_up, (wait, op, ranks))
        total.meta, wait.meta = wait.meta, {**wait.meta, "val": buffer.meta["val"]}
        wait.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
    graph.erase_node(node)


def _splits(buffer: torch.Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """Rows that each rank sends, and that it takes."""
    rows = buffer.shape[0] // ranks
    return [rows] * ranks, [rows] * ranks
