"""The redistributions of a plan, where specs disagree: one for each layout of a value, shared by all who read that layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from fxshard.cost import bucketing_saving
from fxshard.graph.planning_graph import producer, shape_and_itemsize
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price, bucketed_path, path_communication, path_price, steps
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.overlap import Overlap
from fxshard.passes.annotation.recompute import Recomputed
from fxshard.plans.plan_data import OpSpec, Redistribution, again

Specs = Mapping[str, OpSpec]
Reader = tuple[str, int]
Hides = Callable[[str, Sequence[Reader]], Overlap | None]
"""(value, all its readers in the forward or in the backward) -> the compute that hides the redistribution to them."""


@dataclass
class _Value:
    """A value and its readers. ``moves``: the readers of each redistribution (source, target, whether it starts from the saved copy);
    ``halves``: all readers, by whether they read the saved copy; ``early``: the layouts that the forward reads."""

    node: fx.Node
    moves: dict[tuple[Layout, Layout, bool], list[Reader]] = field(default_factory=dict)
    halves: dict[bool, list[Reader]] = field(default_factory=dict)
    early: set[Layout] = field(default_factory=set)

    def read(self, reader: Reader, have: Layout, want: Layout, kept: Layout | None, late: bool) -> None:
        """``kept``: the layout in which the backward finds the value; None if as produced, or if the reader is in the forward."""
        found = have if kept is None else kept
        if found != have:
            self.moves.setdefault((have, found, False), [])
        anew = kept is not None and want != found
        self.halves.setdefault(kept is not None, []).append(reader)
        if anew or want != have:
            self.moves.setdefault((found if anew else have, want, anew), []).append(reader)
        if not late:
            self.early.add(want)

    def ahead(self, move: tuple[Layout, Layout, bool], kept: Layout | None) -> bool:
        """Whether a move makes the copy saved for the backward and nothing else; it runs while the forward has the value."""
        _, target, anew = move
        return not anew and kept == target and target not in self.early


def redistributions(
    annotated: Annotated, specs: Specs, price: Price, kept: Mapping[str, Layout], hides: Hides | None
) -> list[Redistribution]:
    """For each value, in graph order, one entry per layout, other than its own, that readers need.

    The backward reads the layout of a value in ``kept`` and redistributes from there.
    """
    moves = []
    for value in _values(annotated.times, specs, kept):
        name, keep = value.node.name, kept.get(value.node.name)
        for move, readers in value.moves.items():
            key = "redistribution", name, move, tuple(readers), tuple(value.halves.get(move[2], ())), value.ahead(move, keep), hides is None
            moves.append(annotated.plan_entries(key, (price,), partial(_entry, value, move, keep, price, annotated, hides)))
    return moves


def _values(times: Lifetimes, specs: Specs, kept: Mapping[str, Layout]) -> list[_Value]:
    values: dict[str, _Value] = {}
    for node, read in times.operands.items():
        late = bool(kept) and times.in_backward(node)
        for k, (operand, want) in enumerate(zip(read, specs[node.name].inputs, strict=True)):
            source, index = producer(operand)
            value = values.setdefault(operand.name, _Value(operand))
            value.read((node.name, k), specs[source.name].outputs[index], want, kept.get(operand.name) if late else None, late)
    return list(values.values())


def _entry(
    value: _Value, move: tuple[Layout, Layout, bool], kept: Layout | None, price: Price, annotated: Annotated, hides: Hides | None
) -> Redistribution:
    """``kept``: the layout in which the value is saved for the backward, if it is."""
    (source, target, anew), mesh = move, annotated.mesh
    moved = source, target, *annotated.prices.extent(value.node), mesh, price
    beside = None if hides is None else hides(value.node.name, value.halves.get(anew, []))
    joins = beside is not None and beside.joins
    path, cost = bucketed_path(*moved, bucketing_saving(mesh)) if joins else (steps(*moved), path_price(*moved))
    hidden = 0.0 if beside is None else float(beside.hidden(path_communication(*moved)))
    return Redistribution(
        value.node.name,
        *shape_and_itemsize(value.node),
        source,
        target,
        path,
        tuple(value.moves[move]),
        cost=cost - hidden,
        hidden=hidden,
        ahead=value.ahead(move, kept),
    )


def hiding(traced: Annotated, recomputed: Recomputed) -> Hides:
    """A function that gives the overlap of a value's redistributions, by its name and readers; for a recomputed value, that of its first
    run."""
    known, redone = traced.graph.by_name, set(itertools.chain.from_iterable(recomputed.values()))
    first = {again(name): name for name, node in known.items() if producer(node)[0].name in redone}

    def beside(value: str, readers: Sequence[Reader]) -> Overlap | None:
        return traced.prices.overlap(first.get(value, value), [reader for reader in readers if reader[0] in known])

    return beside
