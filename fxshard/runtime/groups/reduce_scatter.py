"""Reduce-scatter by all-to-all, for backends without an efficient one: gloo's is an all-reduce of which each rank keeps its part.

Each rank sends every other rank that rank's block, and reduces the blocks that arrive. This takes half of the bytes, and of the time.
Decision 0031.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from fxshard.program.sharded_program import ProgramCollective

c10d = torch.ops._c10d_functional
WITHOUT_REDUCE_SCATTER = frozenset({"gloo"})
"""Backends whose reduce-scatter sends as many bytes as an all-reduce."""
REDUCE_BLOCKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "product": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.mean(0),
}
"""Reductions over dim 0; sums of bfloat16 and float16 accumulate in float32 and round once."""


def issued_kind(backend: str, kind: str) -> str:
    """The kind of collective that a rank issues on ``backend`` for one of ``kind`` in a program."""
    return "all_to_all" if kind == "reduce_scatter" and backend in WITHOUT_REDUCE_SCATTER else kind


def as_issued(backends: Mapping[str, str], one: ProgramCollective) -> ProgramCollective:
    """``one`` as a rank issues it; ``backends``: the name of the backend for each axis."""
    return replace(one, kind=issued_kind(backends[one.axis], one.kind))


def reduce_blocks(arrived: torch.Tensor, op: str, ranks: int) -> torch.Tensor:
    """The reduction ``op`` of the blocks in ``arrived``, one of each rank, concatenated on dim 0."""
    return REDUCE_BLOCKS[op](arrived.view(ranks, arrived.shape[0] // ranks, *arrived.shape[1:]))


def reduce_scatter(buffer: torch.Tensor, op: str, ranks: int, group: str, backend: str) -> torch.Tensor:
    """This rank's block of the reduction of all ranks' ``buffer``, computed as in a program on ``backend``."""
    if issued_kind(backend, "reduce_scatter") == "all_to_all":
        arrived = c10d.all_to_all_single.default(buffer, *_equal_splits(buffer, ranks), group)
        return reduce_blocks(c10d.wait_tensor.default(arrived), op, ranks)
    return c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(buffer, op, ranks, group))


def replace_by_all_to_all(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a reduce-scatter, in place, by an all-to-all and a reduction right after the wait; the wait stays where it is."""
    buffer, op, ranks, group = node.args
    with graph.inserting_before(node):
        exchange = graph.call_function(c10d.all_to_all_single.default, (buffer, *_equal_splits(buffer.meta["val"], ranks), group))
    exchange.meta = {**node.meta, "val": buffer.meta["val"]}
    for wait in list(node.users):
        wait.replace_input_with(node, exchange)
        with graph.inserting_after(wait):
            total = graph.call_function(reduce_blocks, (wait, op, ranks))
        total.meta, wait.meta = wait.meta, {**wait.meta, "val": buffer.meta["val"]}
        wait.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
    graph.erase_node(node)


def _equal_splits(buffer: torch.Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """(rows to send to each rank, rows to receive from each rank)."""
    rows = buffer.shape[0] // ranks
    return [rows] * ranks, [rows] * ranks
