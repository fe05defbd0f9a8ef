"""The values that the backward needs from the forward, and how they get there, under a memory limit.

A value that both read is saved in one layout: as produced, so that the backward redistributes it again (FSDP's reshard after forward), or
in another, either one that the forward reads too or a smaller one. Or it is not saved and its block is recomputed (``recompute``): then its
node is in mode RECOMPUTED, not KEPT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fxshard.graph.planning_graph import PlanningGraph, operands, producer
from fxshard.layout.layouts import Layout
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.annotation.lifetimes import Lifetimes, Span, values_of
from fxshard.passes.annotation.recompute import blocks

KEPT, RECOMPUTED = range(2)
Layouts = tuple[Layout | None, ...]
"""A layout per state; None where there is no value or no reader."""


def in_modes(cache: IdentityCache, layouts: Layouts, states: tuple[int, ...] | None, modes: tuple[int, ...]) -> Layouts:
    """Layouts by state, None in states of other modes; ``states``: the mode of each state, None if there is only one."""
    if states is None or set(states) <= set(modes):
        return layouts
    made = lambda: tuple(at if mode in modes else None for at, mode in zip(layouts, states, strict=True))  # noqa: E731
    return cache(("in modes", modes), (layouts, states), made)


def recompute_costs(have: Layouts, read: Layouts, modes: Sequence[int], redone: int) -> np.ndarray:
    """0 for consistent pairs: a recomputed value takes a state from ``redone`` on, with the layout in which it is produced; others take an
    earlier state. Else inf."""
    second, again = np.arange(len(read)) >= redone, np.array(modes) == RECOMPUTED
    numbers = {layout: k for k, layout in enumerate(dict.fromkeys((*have, *read)))}
    made, wanted = (np.array([numbers[layout] for layout in end]) for end in (have, read))
    wrong = (again[:, None] != second[None, :]) | (again[:, None] & (made[:, None] != wanted[None, :]))
    return np.where(wrong, np.inf, 0.0)


@dataclass(frozen=True)
class Crossing:
    """A value that both the forward and the backward read, or may read if a block is recomputed.

    ``early``, ``late``: its readers in each; ``redone``: readers in the forward that may run again. Spans: ``made`` as produced, for the
    forward; ``first`` in the layouts that the forward reads; ``second`` in those that the backward reads. ``end``: when the backward no
    longer needs it in any layout. ``own``: whether it owns its memory, which is freed once nobody needs it.
    """

    value: fx.Node
    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    redone: tuple[fx.Node, ...]
    made: Span
    first: Span
    second: Span
    own: bool

    @property
    def end(self) -> int:
        return self.second[1]


class Modes:
    """The modes that each node may take, and the values that cross from the forward to the backward."""

    def __init__(self, graph: PlanningGraph, together: Iterable[Sequence[fx.Node]] = ()) -> None:
        self.blocks = blocks(Lifetimes(graph), together)
        self.block = {node: block for block in self.blocks for node in block.nodes}
        self.times = Lifetimes(graph, [(block.before, block.nodes) for block in self.blocks])

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """The modes of a node; nodes that are decided together share them."""
        return (KEPT, RECOMPUTED) if node in self.block else (KEPT,)

    def recomputed_readers(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """Nodes whose second run reads the value."""
        return tuple(r for r in self.times.readers.get(value, ()) if r in self.block)

    def crossing(self, value: fx.Node) -> Crossing | None:
        times, source, readers = self.times, producer(value)[0], self.times.readers.get(value, [])
        early, late = (tuple(r for r in readers if times.in_backward(r) is half) for half in (False, True))
        redone = self.recomputed_readers(value)
        if all(r.op == "output" for r in early) or not (late or (redone and source not in self.block)):
            return None  # if only the backward and the output read it, all its readers share one value
        own = source.op != "placeholder" and not times.is_view(source)
        made = times.own_span(value) if not own else (times.born(value), max(times.read_until(value, r) for r in early))
        return Crossing(value, early, late, redone, made, times.copy_span(value, early), self.backward_span(late, redone, value), own)

    def backward_span(self, late: Sequence[fx.Node], redone: Sequence[fx.Node], value: fx.Node) -> Span:
        """From the first read in the backward to the time when no reader there needs it any more."""
        starts = [*(self.times.time[r] for r in late), *(self.times.recomputed_at[r] for r in redone)]
        ends = [*(self.times.read_until(value, r) for r in late), *map(self._second_run_until, redone)]
        return min(starts), max(ends)

    def forward_end(self, value: fx.Node) -> int:
        """When the forward no longer needs a value that is recomputed."""
        ends = [self.times.born(value) + 1]
        for reader in self.times.readers.get(value, ()):
            if not self.times.in_backward(reader):
                views = values_of(reader) if self.times.is_view(reader) else []
                ends += [self.forward_end(v) for v in views] or [self.times.read_until(value, reader)]
        return max(ends)

    def views_until(self, value: fx.Node) -> int:
        """When second runs no longer need the value's memory because of views that are not recomputed themselves; 0 if they never do."""
        ends = [0]
        for reader in self.times.readers.get(value, ()):
            for view in values_of(reader) if self.times.is_view(reader) and reader not in self.block else ():
                ends += [self.views_until(view), *map(self._second_run_until, self.recomputed_readers(view))]
        return max(ends)

    def recomputed_span(self, value: fx.Node) -> Span:
        """The span of the recomputed copy of a value."""
        made = self.times.recomputed_at[producer(value)[0]]
        return made, self._backward_end(value, made)

    def reads(self, value: fx.Node) -> list[int]:
        """The times at which a value is read, in first and second runs."""
        readers = self.times.readers.get(value, ())
        return sorted({*(self.times.time[r] for r in readers), *(self.times.recomputed_at[r] for r in readers if r in self.block)})

    def dying(self, node: fx.Node) -> tuple[bool, ...]:
        """For each operand, whether its memory is free after either run of ``node``; not if a second run may still read it."""
        return tuple(dies and not self._read_by_second_run(o) for dies, o in zip(self.times.last_uses(node), operands(node), strict=True))

    def _read_by_second_run(self, value: fx.Node) -> bool:
        """Whether a second run may read the value, or a view of it, that is not itself recomputed."""
        if producer(value)[0] in self.block:
            return False
        readers = self.times.readers.get(value, ())
        views = (v for r in readers if self.times.is_view(r) for v in values_of(r))
        return any(r in self.block for r in readers) or any(map(self._read_by_second_run, views))

    def _second_run_until(self, reader: fx.Node) -> int:
        """When the second run of a reader, or the views that it returns, no longer needs the operand."""
        ran = self.times.recomputed_at[reader]
        return max((self._backward_end(v, ran) for v in values_of(reader)), default=ran + 1) if self.times.is_view(reader) else ran + 1

    def _backward_end(self, value: fx.Node, made: int) -> int:
        ends = [made + 1]
        for reader in self.times.readers.get(value, ()):
            if self.times.in_backward(reader):
                ends.append(self.times.read_until(value, reader))
            elif reader in self.block:
                ends.append(self._second_run_until(reader))
        return max(ends)
