"""Mixtures of experts, with rows in the order of tokens: each token has k rows, of which row j is for expert ids[t, j].

Tokens are sharded as in any operator: then each rank computes its own tokens' rows with all experts, and the gradients of their matrices
are pending sums. With sharded experts and whole tokens, a rank computes the rows of its own experts, and gives zeros for all others: a
pending sum. Where an axis shards both, rows travel (GShard, Lepikhin et al., 2020): ``to_experts`` sorts them by expert and sends each
to the rank of its expert, ``from_experts`` brings the results back. Ranks first tell each other their numbers of rows for each expert. A
rank has the rows of its own experts, by the rank that sent them, at the front of a buffer for all rows; nothing is dropped.
If several axes shard both, rows travel on one after the other, innermost first: within nodes, then between them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.call import Call
from fxshard.layout.layouts import ROW_DIMS, Layout, ceil_shape
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
    """Of rows that travel: first the numbers of rows for each expert, then the rows, axis by axis."""
    route, to = _route(spec.inputs[0], spec.outputs[0])
    rows, names, ranks = call.operands[0], mesh.axis_names, mesh.shape
    held = _held(call.arg(2), [ranks[axis] for axis in route.axes])
    counts = [(axis, held * math.prod(ranks[a] for a in route.axes[k:])) for k, axis in enumerate(route.axes)]
    numbers = (NodeCollective("all_to_all", names[axis], (count,), torch.int64.itemsize, 1) for axis, count in counts)
    legs = [*enumerate(route.axes)] if to else [*reversed([*enumerate(route.axes)])]
    sent = ((axis, k if to else k + 1) for k, axis in legs)  # from the layout before or after the leg
    kind, size = "dispatch" if to else "combine", rows.dtype.itemsize
    travelling = (
        NodeCollective(kind, names[axis], _flat(ceil_shape(rows.shape, route.layouts[at], ranks)), size, 0, route.room(at, ranks))
        for axis, at in sent
    )
    return *numbers, *travelling


@dataclass(frozen=True)
class _Route:
    """The axes on which rows travel to their experts, innermost first: the ranks of each then hold all tokens of a shard of the axes
    outside. ``layouts``: of the rows, before the first axis and after each."""

    axes: tuple[int, ...]
    layouts: tuple[Layout, ...]

    def room(self, at: int, mesh: Sequence[int]) -> int:
        """How many times as many rows as are expected have room in the buffer of layout ``at``."""
        return math.prod(mesh[axis] for axis in self.axes[:at])


def _route(of_rows: Layout, of_results: Layout) -> tuple[_Route, bool]:
    """(the route between two layouts, whether to the experts)."""
    to = bool(of_results.expert_axes)
    axes = (of_results if to else of_rows).expert_axes[::-1]
    layouts = [of_rows if to else of_results]
    for axis in axes:
        layouts.append(layouts[-1].with_axis(axis, ON_EXPERTS))
    return _Route(axes, tuple(layouts)), to


def _held(experts: int, ranks: Sequence[int]) -> int:
    """Most experts of a rank."""
    for n in ranks:
        experts = -(-experts // n)
    return int(experts)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return math.prod(shape[: len(ROW_DIMS)]), *shape[len(ROW_DIMS) :]


def local_to_experts(ctx: LocalContext) -> Any:
    if not ctx.outputs[0].expert_axes:  # rows stay
        return ctx.args[:2]
    journey = _Journey(ctx)
    rows = journey.flat(ctx.args[0])
    for k, leg in enumerate(journey.legs):
        rows = ctx.emit(aten.index_select.default, rows, 0, leg.order)
        rows = journey.carried(ops.dispatch.default, k, k + 1, rows, leg.by_rank(leg.numbers), leg.by_rank(leg.arriving))
    return journey.cut(rows, ctx.output_shape(0)), ctx.emit(aten.reshape.default, journey.experts(), list(ctx.output_shape(1)))


def local_from_experts(ctx: LocalContext) -> Any:
    if not ctx.inputs[0].expert_axes:
        return ctx.args[0]
    journey = _Journey(ctx)
    rows = journey.flat(ctx.args[0])
    for k, leg in reversed([*enumerate(journey.legs)]):
        rows = journey.carried(ops.combine.default, k + 1, k, rows, leg.by_rank(leg.arriving), leg.by_rank(leg.numbers))
        rows = ctx.emit(aten.index_select.default, rows, 0, ctx.emit(aten.argsort.stable, leg.order, stable=True))
    return journey.cut(rows, ctx.output_shape(0))


class _Leg:
    """Rows on one axis of ``ranks``. ``places`` [rows]: the rank for which a row is, times ``held``, plus its place there; ``ranks * held``
    where there is no row (only if ``gaps``).

    ``order``: of the rows, by place; ``numbers`` [ranks x held]: of this rank's rows for each place; ``arriving``: of other ranks' rows for
    this rank's places.
    """

    def __init__(self, ctx: LocalContext, axis: int, places: fx.Node, held: int, gaps: bool) -> None:
        self.ctx, self.ranks, self.held = ctx, ctx.mesh.shape[axis], held
        self.order = ctx.emit(aten.argsort.stable, places, stable=True)
        zeros = ctx.emit(aten.full.default, [self.ranks * held + gaps], 0, dtype=torch.int64)
        numbers = ctx.emit(aten.scatter_add.default, zeros, 0, places, ctx.emit(aten.ones_like.default, places))
        self.numbers = ctx.emit(aten.slice.Tensor, numbers, 0, 0, self.ranks * held) if gaps else numbers
        each = [held] * self.ranks
        self.arriving = ctx.arrived(ctx.collective(c10d.all_to_all_single.default, self.numbers, each, each, axis=axis))

    def by_rank(self, numbers: fx.Node) -> fx.Node:
        return self.ctx.emit(aten.sum.dim_IntList, self.ctx.emit(aten.reshape.default, numbers, [self.ranks, self.held]), [1])

    def arrived_places(self, count: int) -> tuple[fx.Node, fx.Node]:
        """(the place of each of ``count`` rows in the buffer, by the order in which they arrive, whether it is no row)."""
        emit = self.ctx.emit
        group = emit(aten.searchsorted.Tensor, emit(aten.cumsum.default, self.arriving, 0), emit(aten.arange.default, count), right=True)
        return emit(aten.remainder.Scalar, group, self.held), emit(aten.ge.Scalar, group, self.ranks * self.held)


class _Journey:
    """Rows to their experts, or back: a leg on each axis of the route."""

    def __init__(self, ctx: LocalContext) -> None:
        self.ctx, self.total = ctx, ctx.call.arg(2)
        self.route, _ = _route(ctx.inputs[0], ctx.outputs[0])
        ranks = [ctx.mesh.shape[axis] for axis in self.route.axes]
        self.held = _held(self.total, ranks)
        places, self.legs = self._places(ctx.emit(aten.reshape.default, ctx.args[1], [-1])), list[_Leg]()
        for k, axis in enumerate(self.route.axes):
            held = self.held * math.prod(ranks[k + 1 :])
            self.legs.append(_Leg(ctx, axis, places, held, gaps=k > 0))
            if k + 1 < len(ranks):
                places = self._filled(*self.legs[-1].arrived_places(self._room(k + 1)[0]), held)

    def _places(self, ids: fx.Node) -> fx.Node:
        """Of experts: the ranks that hold them, in the order of the route, then the place among those of a rank."""
        if len(self.route.axes) == 1:  # equal shards, but for the last
            return ids
        emit, indexes, rest = self.ctx.emit, dict[int, fx.Node](), ids
        for axis, step in self._steps(indexes.__getitem__):
            indexes[axis] = emit(aten.div.Tensor_mode, rest, step, rounding_mode="floor")
            rest = emit(aten.remainder.Scalar if isinstance(step, int) else aten.remainder.Tensor, rest, step)
        found, *others = (indexes[axis] for axis in self.route.axes)
        for axis, index in zip(self.route.axes[1:], others, strict=True):
            found = emit(aten.add.Tensor, emit(aten.mul.Scalar, found, self.ctx.mesh.shape[axis]), index)
        return emit(aten.add.Tensor, emit(aten.mul.Scalar, found, self.held), rest)

    def _steps(self, index: Callable[[int], fx.Node]) -> Iterator[tuple[int, Any]]:
        """(axis, experts of each of its ranks), in mesh order, in which the axes cut the experts. If shards are uneven, an inner axis cuts
        less on the last ranks of an outer one: ``index`` says on which."""
        emit, size = self.ctx.emit, self.total
        for axis in sorted(self.route.axes):
            ranks = self.ctx.mesh.shape[axis]
            if isinstance(size, int):
                step = -(-size // ranks)
                yield axis, step
                if size % ranks == 0:
                    size = step
                    continue
                left = emit(aten.rsub.Scalar, emit(aten.mul.Tensor, index(axis), step), size)
                size = emit(aten.clamp.default, left, 0, step)
            else:
                step = emit(aten.div.Tensor_mode, emit(aten.add.Tensor, size, ranks - 1), ranks, rounding_mode="floor")
                yield axis, (step := emit(aten.clamp.default, step, 1))
                size = emit(aten.minimum.default, emit(aten.sub.Tensor, size, emit(aten.mul.Tensor, index(axis), step)), step)

    def _first(self) -> fx.Node:
        """This rank's first expert."""
        offsets = [self.ctx.emit(aten.mul.Tensor, self.ctx.axis_index(axis), step) for axis, step in self._steps(self.ctx.axis_index)]
        return functools.reduce(lambda a, b: self.ctx.emit(aten.add.Tensor, a, b), offsets)

    def _filled(self, places: fx.Node, empty: fx.Node, value: int) -> fx.Node:
        return self.ctx.emit(aten.masked_fill.Scalar, places, empty, value)

    def _room(self, at: int) -> tuple[int, ...]:
        """The buffer of layout ``at`` of the route, of ceil size, so that ranks issue equal collectives."""
        return _flat(ceil_shape(self.ctx.call.operands[0].shape, self.route.layouts[at], self.ctx.mesh.shape))

    def flat(self, x: fx.Node) -> fx.Node:
        return self.ctx.emit(aten.reshape.default, x, list(_flat(tuple(x.meta["val"].shape))))

    def carried(self, target: Any, source: int, result: int, rows: fx.Node, sent: fx.Node, received: fx.Node) -> fx.Node:
        """Rows sent from the buffer of layout ``source`` of the route to that of ``result``."""
        missing = [want - have for want, have in zip(self._room(source), rows.meta["val"].shape, strict=True)]
        if not all(surely(n == 0) for n in missing):
            rows = emit_padding(self.ctx.emit, rows, [n for m in reversed(missing) for n in (0, m)], 0)
        room, axis = self.route.room(source, self.ctx.mesh.shape), self.route.axes[min(source, result)]
        return self.ctx.arrived(self.ctx.collective(target, rows, sent, received, self._room(result)[0], room, axis=axis))

    def experts(self) -> fx.Node:
        """The expert of each row in the last buffer; one too many for those that are no row."""
        place, empty = self.legs[-1].arrived_places(math.prod(self.ctx.output_shape(1)))
        return self._filled(self.ctx.emit(aten.add.Tensor, place, self._first()), empty, self.total)

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
