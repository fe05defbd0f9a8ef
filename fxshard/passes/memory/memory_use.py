"""An upper bound on the memory of a plan, as the `Live`s of the problem's variables and transfers.

A value takes the bytes of its shard while it exists as produced (``lifetimes``), depending on the mode of its node (``modes``). Each
redistributed copy takes its own bytes from the first reader that shares it to the last. Views take nothing. Nodes and redistributions need
workspace while they run (``workspace``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import fx

from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import UNKNOWN, outputs_of, plain_shape, producer, shape_and_itemsize
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price, path_table_for, steps
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.groups import Group, internal_redistributions
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.annotation.lifetimes import Span, parameter_state, shard_bytes
from fxshard.passes.annotation.prices import Prices
from fxshard.passes.memory import workspace
from fxshard.passes.memory.offload import PARAMETER, held_on_device
from fxshard.passes.memory.saved_for_backward import RECOMPUTED, Crossing, Modes
from fxshard.plans.plan_data import OpSpec
from fxshard.solver import Live

Ends = tuple[tuple[Layout | None, ...], ...]


@dataclass(frozen=True)
class Reader:
    """A read of a value: variable ``var`` reads it in ``layouts[state]``, as operand ``operand`` of ``node``."""

    var: int
    layouts: tuple[Layout, ...]
    node: str
    operand: int


@dataclass(frozen=True)
class Redistributed:
    """The redistributed copies of a value: the transfer's index, the layouts by state at its ends (producer, then readers), the span."""

    value: fx.Node
    transfer: int
    ends: Ends
    span: Span


@dataclass(frozen=True)
class Kept:
    """How a value reaches the backward: variable ``var`` chooses the saved one of ``layouts``, None where it is not saved.

    ``read``: the layout in which the backward finds it, by state, also if it is recomputed. ``transfer``: a free one from the producer to
    ``var``, used if the saved copy takes memory beside the original.
    """

    crossing: Crossing
    var: int
    layouts: tuple[Layout | None, ...]
    read: tuple[Layout | None, ...]
    transfer: int = -1
    ends: Ends = ()


@dataclass(frozen=True)
class MemoryUse:
    """``node_vars`` and ``states`` as in ``Formulation``; ``price`` and ``prices`` determine the cheapest paths; ``places``: as in
    ``Formulation``."""

    modes: Modes
    mesh: Mesh
    optimizer: Optimizer
    cache: IdentityCache
    node_vars: Mapping[str, tuple[int, tuple[OpSpec, ...]]]
    states: Mapping[int, tuple[int, ...]]
    price: Price
    prices: Prices
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def as_produced(self, redistributed: Sequence[Redistributed]) -> Iterator[Live]:
        """Values as produced. One that is only returned, and never redistributed, lives to the end."""
        times, moved = self.modes.times, {one.value for one in redistributed}
        for value in times.values:
            source, index = producer(value)
            if times.is_view(source):
                continue
            if source.op == "placeholder":
                yield from self.of_input(value)
                continue
            var, specs = self.node_vars[source.name]
            given = self.cache(("given", index), (specs,), partial(given_layouts, specs, index))
            amounts = self.bytes_of(value, (given,))
            lo, hi = self._made(value)
            if times.only_returned(value) and value not in moved:
                hi = times.end
            if source not in self.modes.block:
                yield Live(lo, hi, amounts, var)
                continue
            early = min(hi, max(self.modes.forward_end(value), self.modes.views_until(value)))
            again = self._when_recomputed(var, amounts)
            yield Live(lo, early, amounts, var)
            yield Live(early, hi, amounts - again, var)
            yield Live(*self.modes.recomputed_span(value), again, var)

    def of_input(self, value: fx.Node, certain: bool = False) -> Iterator[Live]:
        """An input, to the end; a parameter with the state of its optimiser, unless that is on the host.

        A parameter on the host counts while the forward and the backward read it; if ``certain``, only when they first do.
        """
        times, (var, specs) = self.modes.times, self.node_vars[value.name]
        bytes_ = self.bytes_of(value, (self.cache(("given", 0), (specs,), partial(given_layouts, specs, 0)),))
        state = parameter_state(value, self.optimizer) if value.name in times.trained else 1.0
        held = state if var not in self.places else np.array([held_on_device(place, state) for place in self.places[var]])
        yield Live(*times.own_span(value), held * bytes_, var)
        if var not in self.places or PARAMETER not in self.places[var]:
            return
        fetched = np.where(np.array(self.places[var]) == PARAMETER, bytes_, 0.0)
        early, late = (tuple(r for r in times.readers[value] if times.in_backward(r) is half) for half in (False, True))
        redone = self.modes.recomputed_readers(value)
        if early:
            first = min(times.time[r] for r in early)
            until = max(*(times.read_until(value, r) for r in early), self.modes.views_until(value))
            yield Live(first, first + 1 if certain else until, fetched, var)
        if late or redone:
            first, until = self.modes.backward_span(late, redone, value)
            if not (certain and redone):
                yield Live(first, first + 1 if certain else until, fetched, var)

    def _made(self, value: fx.Node) -> Span:
        """The span in which the value exists as produced."""
        crossing = self.modes.crossing(value)
        lo, hi = self.modes.times.own_span(value) if crossing is None else crossing.made
        return lo, max(hi, self.modes.views_until(value))

    def workspaces(self, transfers: Sequence[Redistributed]) -> Iterator[Live]:
        """The workspaces of nodes, and of redistributions at every time at which they may run."""
        times = self.modes.times
        for node, time in times.time.items():
            if node.op == "call_function":
                var, specs = self.node_vars[node.name]
                amounts = self.running(node, specs, self.modes.dying(node))
                if amounts.any():
                    yield Live(time, time + 1, amounts, var)
                    if node in times.recomputed_at:
                        yield Live(times.recomputed_at[node], times.recomputed_at[node] + 1, self._when_recomputed(var, amounts), var)
        for one in transfers:
            amounts = self.moving_bytes(one.value, one.ends)
            if amounts.any():
                only = times.only_returned(one.value) and producer(one.value)[0].op != "placeholder"
                for time in [one.span[0]] if only else [t for t in self.modes.reads(one.value) if one.span[0] <= t < one.span[1]]:
                    yield Live(time, time + 1, amounts, transfer=one.transfer)

    def redistributed(self, transfers: Sequence[Redistributed]) -> Iterator[Live]:
        """Redistributed copies. One that is only returned is made at once; until then the original is counted as produced."""
        times = self.modes.times
        for one in transfers:
            there, other = self.moved_bytes(one.value, one.ends)
            lo, hi = one.span[0], max(one.span[1], self.modes.views_until(one.value))
            source = producer(one.value)[0]
            if times.only_returned(one.value) and source.op != "placeholder" and not times.is_view(source):
                yield Live(lo, lo + 1, other, transfer=one.transfer)
                yield Live(lo + 1, hi, there, transfer=one.transfer)
            else:
                yield Live(lo, hi, other, transfer=one.transfer)

    def within_groups(self, groups: Sequence[tuple[int, Group]]) -> Iterator[Live]:
        """The values that the members of a group pass to each other in another layout, by the group's state."""
        times = self.modes.times
        for var, group in groups:
            options = [self.node_vars[n.name][1] for n in group.nodes]
            found: dict[tuple[int, int], np.ndarray] = {}
            for state, chosen in enumerate(zip(*options, strict=True)):
                for member, output, want in internal_redistributions(group, chosen):
                    value = outputs_of(group.nodes[member])[output]
                    assert value is not None
                    amounts, have = found.setdefault((member, output), np.zeros(len(options[0]))), chosen[member].outputs[output]
                    amounts[state] += shard_bytes(plain_shape(value.shape), value.dtype.itemsize, want, self.mesh.shape)
                    amounts[state] += self._moving(group.nodes[member], output, have, want)
            for (member, _), amounts in found.items():
                made = group.nodes[member]
                yield Live(times.time[made], times.time[group.nodes[-1]] + 1, amounts, var)
                if made in times.recomputed_at:
                    yield Live(
                        times.recomputed_at[made], times.recomputed_at[group.nodes[-1]] + 1, self._when_recomputed(var, amounts), var
                    )

    def kept(self, kept: Sequence[Kept]) -> Iterator[Live]:
        """Values saved for the backward, from the end of the forward's reads on; if the original stays anyway, the copy beside it."""
        for one in kept:
            value = one.crossing.value
            if one.crossing.own:
                yield Live(min(self._made(value)[1], one.crossing.end), one.crossing.end, self.bytes_of(value, (one.layouts,)), one.var)
            else:
                _, other = self.moved_bytes(value, one.ends)
                yield Live(one.crossing.first[1], one.crossing.end, other, transfer=one.transfer)

    def _when_recomputed(self, var: int, amounts: np.ndarray) -> np.ndarray:
        return np.where(np.array(self.states[var]) == RECOMPUTED, amounts, 0.0)

    def running(self, node: fx.Node, specs: tuple[OpSpec, ...], dying: tuple[bool, ...]) -> np.ndarray:
        """Workspace of a node in bytes, by spec; ``dying``: the operands that nobody needs after it."""
        key = "running", workspace.node_key(node, dying)
        return self.cache(key, (specs,), lambda: workspace.of_node(node, specs, dying, self.mesh))

    def moving_bytes(self, value: fx.Node, ends: Ends) -> np.ndarray:
        """(given, wanted) workspace in bytes of a redistribution between the distinct layouts of these ends."""
        return self._of_moves(value, ends)[0]

    def moved_bytes(self, value: fx.Node, ends: Ends) -> tuple[np.ndarray, np.ndarray]:
        """(given, wanted) bytes of the copy in the wanted layout, and the same with 0 where it equals the given one; 0 for None."""
        return self._of_moves(value, ends)[1:]

    def _of_moves(self, value: fx.Node, ends: Ends) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ends of equal layers are equal, and not the same objects."""
        tensor, priced = value.meta["val"], self.prices.extent(value)
        layouts = tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

        def make() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            paths = path_table_for([at for at in layouts if at is not None], *priced, self.mesh, self.price)
            meanwhile, excess = workspace.of_moves(tensor, paths, layouts)
            sizes = self.bytes_of(value, ends)
            there = np.tile(sizes, (len(sizes), 1)) + excess
            there[[k for k, layout in enumerate(layouts) if layout is None]] = 0.0
            return meanwhile, there, there - np.diag(np.diag(there))

        shape = plain_shape(tensor.shape)
        strides = () if UNKNOWN in shape else tensor.stride()
        return self.cache(("moves", shape, strides, tensor.dtype, priced, layouts), (), make)

    def _moving(self, node: fx.Node, output: int, have: Layout | None, want: Layout | None) -> int:
        """Workspace and excess storage together, for one output of a node and two layouts."""
        tensor = outputs_of(node)[output]
        if tensor is None or have is None or want is None or have == want:
            return 0
        path = steps(have, want, *self.prices.extent(node, output), self.mesh, self.price)
        return sum(workspace.of_move(tensor, have, path, self.mesh))

    def bytes_of(self, value: fx.Node, ends: Ends) -> np.ndarray:
        """Bytes of a value's shard in each layout: those of one end, or the distinct ones of several; 0 for None."""
        shape, itemsize = shape_and_itemsize(value)
        found = ends[0] if len(ends) == 1 else tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

        def make() -> np.ndarray:
            return np.array([0.0 if at is None else float(shard_bytes(shape, itemsize, at, self.mesh.shape)) for at in found])

        return self.cache(("bytes", shape, itemsize), ends, make)


def given_layouts(specs: Sequence[OpSpec], output: int) -> tuple[Layout | None, ...]:
    return tuple(spec.outputs[output] for spec in specs)
