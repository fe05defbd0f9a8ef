"""A lower bound, as `Live`s, on the memory that every plan holds over time.

A bound on the cost under these lives holds for every plan within ``memory_limit``. ``memory_use`` never counts less than a plan holds, so a
plan found with it keeps the limit; it may count more if a value has several readers. This module counts only memory that is certain. A
value is in memory as produced until its first reader. From then to its last reader it exists either in that layout or in the one that the
last reader wants, so the smaller of the two is certain. The results of views lie in the memory of their operand. No two lives count the
same memory at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import fx

from fxshard.graph.planning_graph import operands, producer, shape_and_itemsize
from fxshard.layout.layouts import Layout
from fxshard.passes.annotation.lifetimes import values_of
from fxshard.passes.memory.memory_use import Kept, MemoryUse, Reader, given_layouts
from fxshard.passes.memory.saved_for_backward import RECOMPUTED, Layouts, in_modes
from fxshard.plans.plan_data import OpSpec
from fxshard.solver import Live, Transfer

Form = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(storage bytes, value bytes), each by layout -> (given, wanted) bytes. The storage of a view is larger than the view."""
Memory = Mapping[Layout | None, float]
"""Bytes of the storage that a view lies in, by the layout of the view."""


def _given_or_wanted(memory: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The value exists in the given or in the wanted layout: the smaller one is certain."""
    return np.minimum(_wanted(memory, sizes), memory[:, None])


def _wanted(memory: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The value exists in the wanted layout."""
    return _copy_besides_given(memory, sizes) + np.diag(memory)


def _copy_besides_given(memory: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The value exists in the wanted layout, in addition to the given one."""
    found = np.where(memory[:, None] > 0, sizes[None, :], 0.0)
    return found - np.diag(np.diag(found))


def _only_if_unmoved(memory: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The value exists if the wanted layout is the given one."""
    return np.diag(memory)


@dataclass(frozen=True)
class Reading:
    """``node`` reads a value at ``time`` in ``layouts``, by state of variable ``var``, until ``until``; ``again``: in its second run."""

    node: fx.Node
    time: int
    until: int
    var: int
    layouts: Layouts
    again: bool = False


@dataclass(frozen=True)
class Half:
    """A value and its readers in the forward or in the backward, where it has layout ``have``, by state of ``var``."""

    var: int
    have: Layouts
    readings: tuple[Reading, ...]

    @property
    def first(self) -> Reading:
        return min(self.readings, key=lambda r: r.time)


@dataclass
class MemoryLowerBound:
    """``readers`` and ``kept`` (by value) are the formulation's; ``transfers``: the formulation's, then free ones for these lives."""

    usage: MemoryUse
    readers: Mapping[str, tuple[Reader, ...]]
    kept: Mapping[str, Kept]
    transfers: list[Transfer]
    _pairs: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modes, self.times, self.cache = self.usage.modes, self.usage.modes.times, self.usage.cache

    def lives(self) -> Iterator[Live]:
        """All lives of the bound."""
        for value in self.times.values:
            halves = self._halves(value)
            for half in halves:
                yield from self._copy_for_first_reader(value, half)
            if not self.times.is_view(producer(value)[0]):
                yield from self._made(value, halves)
        for kept in self.kept.values():
            yield from self._kept_copy(kept)
        yield from self._node_workspaces()

    def _made(self, value: fx.Node, halves: Sequence[Half]) -> Iterator[Live]:
        """The lives of a value with its own memory."""
        times, (source, index), born = self.times, producer(value), self.times.born(value)
        if source.op == "placeholder":
            yield from self.usage.of_input(value, certain=True)
            return
        var, specs = self.usage.node_vars[source.name]
        bytes_ = self.usage.bytes_of(value, (self.cache(("given", index), (specs,), partial(given_layouts, specs, index)),))
        if not halves:
            yield Live(born, born + 1, bytes_, var)
            return
        inside, again = source in self.modes.block, np.zeros(0)
        if inside:
            again = np.where(np.array(self.usage.states[var]) == RECOMPUTED, bytes_, 0.0)
        late = all(times.in_backward(r.node) for r in halves[0].readings) and not times.in_backward(source)
        since = max(born, self._first(value, halves[0])) + 1
        if inside and late:  # a recomputed value is freed in between
            yield Live(born, born + 1, bytes_, var)
            yield Live(born + 1, since, bytes_ - again, var)
        else:
            yield Live(born, since, bytes_, var)
        if inside and source in times.recomputed_at:
            runs = (
                [halves[-1].first.time]
                if late or len(halves) > 1
                else [times.recomputed_at[r] for r in self.modes.recomputed_readers(value)]
            )
            if runs:
                yield Live(times.recomputed_at[source], max(min(runs), times.recomputed_at[source]) + 1, again, var)
        if len(halves) == 1:
            yield from self._until_last_reader(value, halves[0], since)
        else:
            yield from self._kept_for_backward(value, halves, since)

    def _kept_for_backward(self, value: fx.Node, halves: Sequence[Half], since: int) -> Iterator[Live]:
        """The value kept for the backward, from ``since`` on: as produced or already in the saved layout."""
        kept, read = self.kept[value.name], halves[1].first.time + 1
        made = max(since, kept.crossing.made[1])
        yield from self._live_of_pair(value, halves[0], kept.var, kept.layouts, _given_or_wanted, since, min(made, read))
        if made >= read:  # it is also returned, so it lives to the end
            yield from self._until_last_reader(value, halves[0], max(since, read))
            return
        yield Live(made, read, self.usage.bytes_of(value, (kept.layouts,)), kept.var)
        yield from self._until_last_reader(value, halves[1], read)

    def _kept_copy(self, kept: Kept) -> Iterator[Live]:
        """The saved copy of a value that does not own its memory."""
        if kept.transfer >= 0:
            _, other = self.usage.moved_bytes(kept.crossing.value, kept.ends)
            yield Live(kept.crossing.first[1], kept.crossing.second[0] + 1, other, transfer=kept.transfer)

    def _until_last_reader(self, value: fx.Node, half: Half, since: int, memory: Memory | None = None) -> Iterator[Live]:
        """The memory of a value from ``since``, after its first read, to its last reader and that of the views of it."""
        last = max(half.readings, key=lambda r: (r.until, r.time))
        form = _wanted if self.times.only_returned(value) else _given_or_wanted
        yield from self._live_of_pair(value, half, last.var, last.layouts, form, since, last.time, memory)
        yield from self._live_of_pair(value, half, last.var, last.layouts, _wanted, max(since, last.time), last.time + 1, memory)
        if self.times.is_view(last.node) and not last.again:
            yield from self._through_view(value, last.node, max(since, last.time + 1), memory)

    def _through_view(self, operand: fx.Node, view: fx.Node, since: int, memory: Memory | None) -> Iterator[Live]:
        """The memory of ``operand``, read by a view in any layout, for as long as the view's result is read."""
        value = max(values_of(view), key=self.times.last.__getitem__, default=None)
        halves = [] if value is None else self._halves(value)
        if value is None or not halves:
            return
        var, specs = self.usage.node_vars[view.name]
        index, size = producer(value)[1], shape_and_itemsize(operand)
        read = max(since, self._first(value, halves[0]) + 1)
        amounts, lies = self.cache(("view", index, *size), (specs, memory), partial(self._storage_of_view, operand, specs, index, memory))
        yield Live(since, read, amounts, var)
        if len(halves) > 1:
            kept, late = self.kept[value.name], max(read, halves[1].first.time + 1)
            yield from self._live_of_pair(value, halves[0], kept.var, kept.layouts, _only_if_unmoved, read, late, lies)
            read, lies = late, self.cache(("kept",), (lies, kept.read), partial(self._at_least, value, lies, kept.read))
        yield from self._until_last_reader(value, halves[-1], read, lies)

    def _at_least(self, value: fx.Node, memory: Memory, read: Layouts) -> Memory:
        """The same memory, or less where the view may have been saved as a copy of its own."""
        return {at: min(size, memory.get(at, size)) for at, size in zip(read, self.usage.bytes_of(value, (read,)), strict=True)}

    def _storage_of_view(self, operand: fx.Node, specs: Sequence[OpSpec], index: int, memory: Memory | None) -> tuple[np.ndarray, Memory]:
        """Bytes of the storage of a view, by spec; and the least over specs, by the view's layout."""
        wanted = tuple(spec.inputs[0] for spec in specs)
        own = self.usage.bytes_of(operand, (wanted,))
        sizes = [size if memory is None else min(size, memory.get(at, size)) for at, size in zip(wanted, own, strict=True)]
        found: dict[Layout | None, float] = {}
        for spec, size in zip(specs, sizes, strict=True):
            found[spec.outputs[index]] = min(size, found.get(spec.outputs[index], np.inf))
        return np.array(sizes), found

    def _copy_for_first_reader(self, value: fx.Node, half: Half) -> Iterator[Live]:
        """The copy for the first reader in a half, beside the original, and the workspace of the redistribution."""
        first, time, base = half.first, self._first(value, half), producer(value)[0]
        until = time + 1
        if base.op == "placeholder" and self.times.is_view(first.node) and not first.again:  # the original stays in any case
            views = [v for v in values_of(first.node) if v in self.times.readers]
            until = max(until, min((self._needed(v) + 1 for v in views), default=until))
        yield from self._live_of_pair(value, half, first.var, first.layouts, _copy_besides_given, time, until)
        yield from self._move_workspace(value, half, first, time)
        late = [r for r in half.readings if not r.again]
        if first.again and late and base.op == "placeholder":
            other = min(late, key=lambda r: r.time)
            yield from self._live_of_pair(value, half, other.var, other.layouts, _copy_besides_given, other.time, other.time + 1)

    def _move_workspace(self, value: fx.Node, half: Half, reading: Reading, time: int) -> Iterator[Live]:
        if reading.var == half.var:
            return
        amounts = self.usage.moving_bytes(value, (half.have, reading.layouts))
        if amounts.any():
            yield Live(time, time + 1, amounts, transfer=self._transfer(half.var, half.have, reading.var, reading.layouts))

    def _node_workspaces(self) -> Iterator[Live]:
        """The workspaces of nodes; an operand that may die at the node is subtracted."""
        for node, time in self.times.time.items():
            if node.op == "call_function":
                yield from self._node_workspace(node, time, self._dying(node), None)
                if node in self.times.recomputed_at:
                    yield from self._node_workspace(node, self.times.recomputed_at[node], self.times.owns_memory(node), RECOMPUTED)

    def _node_workspace(self, node: fx.Node, time: int, dying: tuple[bool, ...], mode: int | None) -> Iterator[Live]:
        var, specs = self.usage.node_vars[node.name]
        amounts = self.usage.running(node, specs, dying)
        if amounts.any():
            found = amounts if mode is None else np.where(np.array(self.usage.states[var]) == mode, amounts, 0.0)
            yield Live(time, time + 1, found, var)

    def _dying(self, node: fx.Node) -> tuple[bool, ...]:
        """Operands not needed after the first run of ``node``; in the forward, also those that may be recomputed for later readers."""
        if self.times.in_backward(node):
            return self.times.last_uses(node)
        redone = [producer(o)[0] in self.modes.block and self.modes.forward_end(o) <= self.times.time[node] + 1 for o in operands(node)]
        return tuple(
            dies or (one and may) for dies, one, may in zip(self.times.last_uses(node), self.times.owns_memory(node), redone, strict=True)
        )

    def _halves(self, value: fx.Node) -> list[Half]:
        """The readers of the value as produced and, if it crosses into the backward, those of the saved value; empty without readers."""
        source, index = producer(value)
        var, specs = self.usage.node_vars[source.name]
        have = self.cache(("layouts", "outputs", index), (specs,), partial(given_layouts, specs, index))
        crossing, found = self.modes.crossing(value), self.readers.get(value.name, ())
        if not found:
            return []
        if crossing is None:
            return [Half(var, have, tuple(self._reading(value, r) for r in found))]
        names, kept = {n.name for n in crossing.early}, self.kept[value.name]
        early = tuple(self._reading(value, r) for r in found if r.node in names)
        late = [self._reading(value, r) for r in found if r.node not in names]
        redone = {n.name for n in crossing.redone}
        late += [self._reading(value, r, again=True) for r in found if r.node in redone]
        return [Half(var, have, early), Half(kept.var, kept.read, tuple(late))]

    def _reading(self, value: fx.Node, reader: Reader, again: bool = False) -> Reading:
        node = self.times.graph.by_name.get(reader.node) or self.times.graph.module.graph.output_node()
        if not again:
            return Reading(node, self.times.time[node], self.times.read_until(value, node), reader.var, reader.layouts)
        layouts = in_modes(self.cache, reader.layouts, self.usage.states.get(reader.var), (RECOMPUTED,))
        return Reading(node, self.times.recomputed_at[node], self.times.recomputed_at[node] + 1, reader.var, layouts, True)

    def _first(self, value: fx.Node, half: Half) -> int:
        """When a half is first read; a value that is only returned is redistributed as soon as it is produced."""
        only = self.times.only_returned(value) and producer(value)[0].op != "placeholder"
        return self.times.born(value) if only else half.first.time

    def _needed(self, view: fx.Node) -> int:
        """When the result of a view is first read; if it is only returned, it is redistributed as soon as it is produced."""
        readers = (self.times.time[r] for r in self.times.readers[view])
        return self.times.born(view) if self.times.only_returned(view) else min(readers)

    def _live_of_pair(
        self, value: fx.Node, half: Half, reader: int, want: Layouts, form: Form, lo: int, hi: int, memory: Memory | None = None
    ) -> Iterator[Live]:
        """A life whose bytes depend on the layout in which a value is given and that in which one reader wants it.

        ``memory``: bytes of the storage that the value is a view of; None if it has a storage of its own.
        """
        if lo >= hi or reader == half.var:
            return
        ends = half.have, want
        amounts = self.cache(
            ("lower bound", form, *shape_and_itemsize(value)), (*ends, memory), partial(self._amounts, value, ends, form, memory)
        )
        if amounts.any():
            yield Live(lo, hi, amounts, transfer=self._transfer(half.var, half.have, reader, want))

    def _amounts(self, value: fx.Node, ends: tuple[Layouts, Layouts], form: Form, memory: Memory | None) -> np.ndarray:
        sizes = self.usage.bytes_of(value, ends)
        if memory is None:
            return form(sizes, sizes)
        layouts = dict.fromkeys(itertools.chain.from_iterable(ends))
        return form(np.array([memory.get(at, size) for at, size in zip(layouts, sizes, strict=True)]), sizes)

    def _transfer(self, var: int, have: Layouts, reader: int, want: Layouts) -> int:
        """A free transfer between two variables, to which a life can refer."""
        key = var, id(have), reader, id(want)
        if key not in self._pairs:
            given, wanted, free = self.cache(("pair",), (have, want), partial(_numbered, have, want))
            self._pairs[key] = len(self.transfers)
            self.transfers.append(Transfer(var, given, ((reader, wanted),), free))
        return self._pairs[key]


def _numbered(have: Layouts, want: Layouts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The indices of the given and wanted layouts among the distinct ones of both, and a table of zero costs."""
    number = {layout: k for k, layout in enumerate(dict.fromkeys(itertools.chain(have, want)))}
    given, wanted = (np.array([number[layout] for layout in end], dtype=np.int64) for end in (have, want))
    return given, wanted, np.zeros((len(number), len(number)))
