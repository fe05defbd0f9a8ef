"""Mixtures of experts, with rows in the order of tokens: each token has k rows, of which row j is for expert ids[t, j].

Tokens are sharded as in any operator: then each rank computes its own tokens' rows with all experts, and the gradients of their matrices
are pending sums. With sharded experts and whole tokens, a rank computes the rows of its own experts, and gives zeros for all others: a
pending sum. Where an axis shards both, rows travel (GShard, Lepikhin et al., 2020): ``to_experts`` sorts them by expert and sends each
to the rank of its expert, ``from_experts`` brings the results back. Ranks first tell each other their numbers of rows for each expert. A
rank has the rows of its own experts, by the rank that sent them, at the front of a buffer for all rows; nothing is dropped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.call import Call
from fxshard.layout.layouts import ROW_DIMS, ceil_shape
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import NodeCollective, OpSpec
from fxshard.strategies.engine.expert_option import ON_EXPERTS
from fxshard.strategies.engine.factors import Factors, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext, emit_padding
from fxshard.strategies.engine.packed import by_factor
from fxshard.strategies.engine.registry import register, replaced

aten = torch.ops.aten
ops = torch.ops.fxshard
c10d = torch.ops._c10d_functional
HERE = Shard(0)
"""Where tokens are, and matrices."""
TO = ((HERE, HERE), (ON_EXPERTS, ON_EXPERTS))
FROM = ((ON_EXPERTS, HERE), (HERE,))
LINEAR = ((ON_EXPERTS, HERE, ON_EXPERTS), (ON_EXPERTS,))
OUTER = ((ON_EXPERTS, ON_EXPERTS, ON_EXPERTS), (HERE,))
"""Placements of (operands, outputs) on an axis that shards experts and the tokens of which they have rows."""


def to_experts(call: Call) -> Factors:
    """(rows [t j h], ids [t j]) -> both."""
    both = [["t", "j", "h"], ["t", "j"]]
    return factors(both, both, linear=linear_groups(call, [(0,)]), depends=((0,), (1,)), on_experts=TO)


def from_experts(call: Call) -> Factors:
    """(rows [t j h], ids [t j]) -> rows."""
    rows = ["t", "j", "h"]
    return factors([rows, ["t", "j"]], [rows], linear=linear_groups(call, [(0,)]), depends=((0,),), on_experts=FROM)


def linear(call: Call) -> Factors:
    """(x [t j m], weight [e m n], ids [t j]) -> [t j n], a sum over m and e."""
    operands = [["t", "j", "m"], ["e", "m", "n"], ["t", "j"]]
    return factors(operands, [["t", "j", "n"]], linear=linear_groups(call, [(0,), (1,)]), on_experts=LINEAR)


def outer(call: Call) -> Factors:
    """(x [t j m], grad [t j n], ids [t j]) -> [e m n], a sum over t and j."""
    operands = [["t", "j", "m"], ["t", "j", "n"], ["t", "j"]]
    return factors(operands, [["e", "m", "n"]], linear=linear_groups(call, [(0,), (1,)]), on_experts=OUTER)


def collectives(call: Call, spec: OpSpec, mesh: Mesh) -> tuple[NodeCollective, ...]:
    """Of rows that travel: first the numbers of rows for each expert, then the rows."""
    axis, to = _axis(spec.outputs[0].expert_axis, spec.inputs[0].expert_axis)
    if axis is None:
        return ()
    rows, ranks, name = call.operands[0], mesh.shape[axis], mesh.axis_names[axis]
    numbers = NodeCollective("all_to_all", name, (ranks * _held(call, ranks),), torch.int64.itemsize, 1)
    buffer = _flat(ceil_shape(rows.shape, spec.inputs[0], mesh.shape))
    return numbers, NodeCollective("dispatch" if to else "combine", name, buffer, rows.dtype.itemsize, 0)


def _axis(of_results: int | None, of_rows: int | None) -> tuple[int | None, bool]:
    """(the axis on which rows travel, whether to experts)."""
    return (of_rows, False) if of_results is None else (of_results, True)


def _held(call: Call, ranks: int) -> int:
    """Most experts of a rank."""
    return int(-(-call.arg(2) // ranks))


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return math.prod(shape[: len(ROW_DIMS)]), *shape[len(ROW_DIMS) :]


def local_to_experts(ctx: LocalContext) -> Any:
    axis = ctx.outputs[0].expert_axis
    if axis is None:  # rows stay
        return ctx.args[:2]
    journey = _Journey(ctx, axis)
    sent = journey.by_rank(journey.numbers)
    rows = ctx.emit(aten.index_select.default, journey.flat(ctx.args[0]), 0, journey.order)
    rows = journey.carried(ops.dispatch.default, rows, sent, journey.by_rank(journey.arriving), ctx.inputs[0], ctx.outputs[0])
    return journey.cut(rows, ctx.output_shape(0)), ctx.emit(aten.reshape.default, journey.experts(), list(ctx.output_shape(1)))


def local_from_experts(ctx: LocalContext) -> Any:
    axis = ctx.inputs[0].expert_axis
    if axis is None:
        return ctx.args[0]
    journey = _Journey(ctx, axis)
    back = journey.by_rank(journey.numbers)
    rows = journey.flat(ctx.args[0])
    rows = journey.carried(ops.combine.default, rows, journey.by_rank(journey.arriving), back, ctx.inputs[0], ctx.outputs[0])
    place = ctx.emit(aten.argsort.stable, journey.order, stable=True)
    return journey.cut(ctx.emit(aten.index_select.default, rows, 0, place), ctx.output_shape(0))


class _Journey:
    """Rows to experts, or back: their ``order`` by expert, the ``numbers`` [ranks x experts of a rank] of this rank's rows for each expert,
    and those of the rows of other ranks for this rank's experts, ``arriving``."""

    def __init__(self, ctx: LocalContext, axis: int) -> None:
        self.ctx, self.axis, self.ranks = ctx, axis, ctx.mesh.shape[axis]
        self.held, self.total = _held(ctx.call, self.ranks), ctx.call.arg(2)
        ids = ctx.emit(aten.reshape.default, ctx.args[1], [-1])
        self.order = ctx.emit(aten.argsort.stable, ids, stable=True)
        zeros = ctx.emit(aten.full.default, [self.ranks * self.held], 0, dtype=torch.int64)
        self.numbers = ctx.emit(aten.scatter_add.default, zeros, 0, ids, ctx.emit(aten.ones_like.default, ids))
        each = [self.held] * self.ranks
        self.arriving = ctx.arrived(ctx.collective(c10d.all_to_all_single.default, self.numbers, each, each, axis=axis))

    def by_rank(self, numbers: fx.Node) -> fx.Node:
        return self.ctx.emit(aten.sum.dim_IntList, self.ctx.emit(aten.reshape.default, numbers, [self.ranks, self.held]), [1])

    def flat(self, x: fx.Node) -> fx.Node:
        return self.ctx.emit(aten.reshape.default, x, list(_flat(tuple(x.meta["val"].shape))))

    def carried(self, target: Any, rows: fx.Node, sent: fx.Node, received: fx.Node, source: Any, result: Any) -> fx.Node:
        """Rows sent in buffers of ceil size, so that ranks issue equal collectives."""
        shape, mesh = self.ctx.call.operands[0].shape, self.ctx.mesh.shape
        most, room = (_flat(ceil_shape(shape, layout, mesh)) for layout in (source, result))
        missing = [want - have for want, have in zip(most, rows.meta["val"].shape, strict=True)]
        if not all(surely(n == 0) for n in missing):
            rows = emit_padding(self.ctx.emit, rows, [n for m in reversed(missing) for n in (0, m)], 0)
        return self.ctx.arrived(self.ctx.collective(target, rows, sent, received, room[0], axis=self.axis))

    def experts(self) -> fx.Node:
        """The expert of each row in the buffer, by the order in which they arrive; one too many for those that are no row."""
        emit, count = self.ctx.emit, math.prod(self.ctx.output_shape(1))
        place = emit(aten.arange.default, count, dtype=torch.int64)
        group = emit(aten.searchsorted.Tensor, emit(aten.cumsum.default, self.arriving, 0), place, right=True)
        first = emit(aten.mul.Tensor, self.ctx.axis_index(self.axis), self.held)
        expert = emit(aten.add.Tensor, emit(aten.remainder.Scalar, group, self.held), first)
        return emit(aten.masked_fill.Scalar, expert, emit(aten.ge.Scalar, group, self.ranks * self.held), self.total)

    def cut(self, rows: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The first rows, without padding, as [t, j, h]."""
        for dim, (want, have) in enumerate(zip(_flat(shape), rows.meta["val"].shape, strict=True)):
            if not surely(want == have):
                rows = self.ctx.emit(aten.index_select.default, rows, dim, self.ctx.emit(aten.arange.default, want, dtype=torch.int64))
        return self.ctx.emit(aten.reshape.default, rows, list(shape))


def local_linear(ctx: LocalContext) -> Any:
    x, weight, ids = ctx.args
    return ctx.emit(ctx.target, x, weight, _counted_from(ctx, ids, ctx.input_offset(1, 0)))


def local_outer(ctx: LocalContext) -> Any:
    ids = _counted_from(ctx, ctx.args[2], ctx.output_offset(0, 0))
    return ctx.emit(ctx.target, *replaced(ctx.args, {2: ids, 3: ctx.output_shape()[0]}))


def _counted_from(ctx: LocalContext, ids: Any, first: Any) -> Any:
    """The ids counted from the rank's first expert; those of other ranks' experts are then out of range."""
    return ids if isinstance(first, int) else ctx.emit(aten.sub.Tensor, ids, first)


register("fxshard.to_experts.default", to_experts, local=local_to_experts, collectives=collectives)
register("fxshard.from_experts.default", from_experts, local=local_from_experts, collectives=collectives)
register("fxshard.expert_linear.default", linear, local=local_linear, packed=by_factor)
register("fxshard.expert_outer.default", outer, local=local_outer, packed=by_factor)
