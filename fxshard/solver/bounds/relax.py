"""Message passing on a model with transfers, then conversion of what pruning leaves to a model without transfers.

Message passing handles transfers directly, by layouts instead of states, and its relaxation is tight where few constraints bind. Most
often the bound meets a plan at once. Otherwise pruning leaves few states, and the joint choices of a value's source and readers fit in
the states of one node.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.links import Link
from fxshard.solver.bounds.merged_links import MergedSweeper, Merging
from fxshard.solver.bounds.pruning import Slacks, find_slacks
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, Undo, add_edge
from fxshard.solver.problem.row_uses import Use
from fxshard.solver.problem.transfers import Transfer, Transfers
from fxshard.solver.reductions import reduce
from fxshard.solver.reductions.arc_consistency import ArcConsistency
from fxshard.solver.reductions.memory import ConstantMemory, DominatedTimes

PATIENCE = 0.001
"""Sweeps continue while four pairs raise the bound by this fraction of the gap: they are cheap compared with the search that follows."""

SPLITTING = 20
"""Pairs of sweeps that split shared prices between readers, at known multipliers, before links are merged."""

MAX_JOINT = 400
"""The most states of a node for the joint choices of a value's source and readers; beyond, a node per layout is used."""


class Relaxation:
    """Message passing on a model with transfers.

    choices, value: the best plan known, and its cost. cutoff: only cheaper plans are better. bound: the proven lower bound.
    undo: maps choices of the presolved model, `ascent.model`, to choices of `model`. tight: the ascent of the highest bounds, see `merge`.
    """

    def __init__(self, model: Model, choices: IntArray | None, budget: Budget) -> None:
        self.model, self.choices = model, choices
        self.value = np.inf if choices is None else model.evaluate(choices)
        self.bound = -np.inf
        smaller, self.undo, _ = reduce(model, (ArcConsistency(), ConstantMemory(), DominatedTimes()), 1, budget)
        self.ascent = Ascent(replace(smaller, cutoff=self.cutoff), budget, lambda choices, _: self.take(choices), PATIENCE)
        self.tight = self.ascent

    def from_state(
        self, state: tuple[FloatArray, ...], model: Model, inner: Model, choices: IntArray | None, gap: float, budget: Budget
    ) -> Relaxation:
        """A relaxation of a narrower model that continues from a saved state of the sweeper, which both share: use only one of them.

        inner: the presolved form of the narrower model, with the same numbers of states. choices: a plan of `model`, if one is known.
        gap: the relative improvement below which a plan counts as no better.
        """
        other = copy(self)
        value = np.inf if choices is None else model.evaluate(choices)
        other.choices, other.value, other.bound = choices, value, -np.inf
        worth = float(np.floor(gap * abs(value))) if np.isfinite(value) else 0.0
        other.model = replace(model, grain=max(model.grain, worth))
        self.ascent.sweeper.restore(state)
        self.ascent.sweeper.allow(np.isfinite(np.concatenate(inner.costs)))
        inner = replace(inner, grain=other.model.grain)
        other.ascent = self.ascent.narrowed(inner, other.cutoff, budget, lambda choices, _: other.take(choices))
        other.tight = other.ascent
        return other

    @property
    def cutoff(self) -> float:
        """The cost below which a plan is better than the best known."""
        return self.value - self.model.grain + 1 if np.isfinite(self.value) else np.inf

    def begin(self, pairs: int) -> None:
        """Sweep `pairs` times in both directions and decode a plan; records no bound."""
        for _ in range(pairs):
            self.ascent.pair()
            if self.ascent.done:
                return
        self.ascent.offer_decoded()

    def run(self, budget: Budget | None = None) -> None:
        """Raise the bound and collect plans, unless the bound has reached the cutoff. budget: by default all that is left."""
        whole = self.ascent.budget
        self.ascent.budget = whole if budget is None else budget
        if self.ascent.bound < self.ascent.cutoff:
            self._raise_bound()
        self.prove(self.ascent.bound)
        self.ascent.budget = self.tight.budget = whole

    def _raise_bound(self) -> None:
        """Message passing; where there are limits, on separate links until the splits of prices are good, and then on merged ones.

        Good splits follow the multipliers. Where these are known, from a tied model or an earlier solve, few sweeps find the splits;
        otherwise the search for multipliers on separate links does. Without limits, pruning leaves so little that branch and bound gains
        nothing from higher bounds.
        """
        ascent = self.tight = self.ascent
        if not len(ascent.model.limits) or not self._mergeable:
            ascent.run()
            return
        if ascent.multipliers.any():
            ascent.settle(SPLITTING)
        else:
            ascent.run()
        self.prove(ascent.bound)
        if not ascent.done:
            self.merge().run()
            ascent.adopt(self.tight)

    @property
    def _mergeable(self) -> bool:
        return self._merging.worthwhile(int(self.ascent.sweeper.splits.own[-1]))

    @cached_property
    def _merging(self) -> Merging:
        return Merging.of(self.ascent.sweeper.wiring)

    def merge(self) -> Ascent:
        """Merge the links at the current messages and multipliers; returns the ascent with merged links, `tight` from now on.

        Where that is not worth it, it is `ascent` itself.
        """
        self.tight = self.ascent.merged(self._merging) if self._mergeable else self.ascent
        return self.tight

    def below(self, target: float) -> tuple[Model, Undo]:
        """The model pruned to plans that cost less than `target`, without transfers; raises `Exhausted` where there are none."""
        left, undo = self.written(find_slacks(self.tight, target), target)
        return left, lambda choices: self.undo(undo(choices))

    def written(self, slacks: Slacks, target: float) -> tuple[Model, Undo]:
        """The model left by the slacks of `tight` for a target, without transfers, and the map of its choices to `ascent.model`."""
        left, undo = write_out(self.ascent.model, slacks, self.tight.sweeper)
        return replace(left, prices=self.tight.multipliers, cutoff=target), undo

    def take(self, choices: IntArray) -> float:
        """Offer a plan of `ascent.model`; returns the new cutoff."""
        return self.offer(self.undo(choices))

    def offer(self, choices: IntArray) -> float:
        """Keep a plan of `model` if it fits and is better; returns the new cutoff."""
        cost = self.model.evaluate(choices)
        if cost < self.value and self.model.fits(choices):
            self.choices, self.value = choices.copy(), cost
            self.ascent.cutoff = min(self.ascent.cutoff, self.cutoff)
            self.tight.cutoff = min(self.tight.cutoff, self.cutoff)
        return self.cutoff

    def prove(self, bound: float) -> None:
        """Record a bound, capped at the cutoff."""
        self.bound = max(self.bound, min(bound, self.cutoff))


def write_out(model: Model, slacks: Slacks, sweeper: Sweeper) -> tuple[Model, Undo]:
    """The model of the remaining states with the costs of `slacks`, and every transfer as nodes and edges."""
    keep = [np.flatnonzero(np.isfinite(costs)) for costs in slacks.costs]
    if not all(len(states) for states in keep):
        raise Exhausted
    writer = _Writer(model, slacks, keep)
    parts: list[list[_Part]] = [[] for _ in model.transfers]
    merged = isinstance(sweeper, MergedSweeper)
    if isinstance(sweeper, MergedSweeper):  # its links are edges; transfers add what they cost on top of their splits
        for link, table in zip(sweeper.links, slacks.tables, strict=True):
            writer.edge(link, table)
        links, tables, splits = sweeper.splits.separated(slacks.tables)
    else:
        links, tables, splits = sweeper.links, slacks.tables, slacks.splits
    for link, table, split in zip(links, tables, splits, strict=True):
        if link.transfer < 0 or (len(model.transfers[link.transfer].readers) == 1 and not writer.uses(link.transfer)):
            if not merged:
                writer.edge(link, table)
        else:
            transfer, readings = model.transfers[link.transfer], parts[link.transfer]
            earlier = [node for node, _ in transfer.readers[: link.reader]]
            if merged and transfer.readers[link.reader][0] in earlier:  # the table of both readings is one, and counts once
                table = np.where(np.isfinite(table), 0.0, np.inf)
            readings.append(_part(transfer, link, table, split, merged))
    for index, readings in enumerate(parts):
        if readings:
            writer.transfer(index, readings)
    count = len(model)

    def undo(choices: IntArray) -> IntArray:
        return np.asarray([states[x] for states, x in zip(keep, choices[:count], strict=True)], dtype=np.int64)

    return writer.finish(), undo


@dataclass(frozen=True)
class _Part:
    """One reader's link of a transfer over all layouts (given, wanted). slack: the least cost. rest: what the link adds to the model, its
    slack, unless an edge has that (apart), less the split price."""

    slack: FloatArray
    rest: FloatArray
    apart: bool


def _part(transfer: Transfer, link: Link, table: FloatArray, split: FloatArray, apart: bool) -> _Part:
    node, want = transfer.readers[link.reader]
    cells = np.ix_(np.unique(transfer.have), np.unique(want))
    slack = np.full(transfer.prices.shape, np.inf)
    rest = slack.copy()
    if node < transfer.source:
        table, split = table.T, split.T
    slack[cells] = table
    own = 0.0 if apart else table
    rest[cells] = np.where(np.isfinite(split), own, np.inf) - np.where(np.isfinite(split), split, 0.0)
    return _Part(slack, rest, apart)


class _Writer:
    """The model under construction: the original nodes with the states in `keep`, then one or more nodes per transfer."""

    def __init__(self, model: Model, slacks: Slacks, keep: list[IntArray]) -> None:
        self.model, self.slacks, self.keep = model, slacks, keep
        self.costs = [costs[states] for costs, states in zip(slacks.costs, keep, strict=True)]
        self.edges: dict[Pair, FloatArray] = {}
        self._uses: list[tuple[Use, ...]] = [
            tuple(use._replace(amount=use.amount[states]) for use in uses) for uses, states in zip(model.uses, keep, strict=True)
        ]

    def uses(self, transfer: int) -> tuple[Use, ...]:
        """The uses of a transfer."""
        return self.model.moved[transfer] if self.model.moved else ()

    def edge(self, link: Link, table: FloatArray) -> None:
        """Add a link without shared prices."""
        rows, columns = link.rows[self.keep[link.i]], link.columns[self.keep[link.j]]
        add_edge(self.edges, link.i, link.j, table[np.ix_(rows, columns)])

    def transfer(self, index: int, parts: list[_Part]) -> None:
        """Add a node for the joint choices of source and readers, or one per layout where there are too many."""
        transfer = self.model.transfers[index]
        have = transfer.have[self.keep[transfer.source]]
        readers = [(node, want[self.keep[node]]) for node, want in transfer.readers]
        joint = _joint(transfer.prices, np.unique(have), [np.unique(want) for _, want in readers], parts, self.slacks.room)
        if joint is None:
            self._by_layout(transfer, have, readers, parts, self.uses(index))
            return
        states, costs = joint
        if not len(costs):
            raise Exhausted
        node = self._node(costs, tuple(use._replace(amount=_paid(use.amount, states)) for use in self.uses(index)))
        for column, (other, layouts) in zip(states.T, [(transfer.source, have), *readers], strict=True):
            add_edge(self.edges, node, other, np.where(column[:, None] == layouts, 0.0, np.inf))

    def finish(self) -> Model:
        """The complete model."""
        written = replace(self.model, costs=self.costs, edges=self.edges, uses=self._uses, constant=self.slacks.constant)
        return replace(written, transfers=Transfers(), moved=())

    def _by_layout(
        self, transfer: Transfer, have: IntArray, readers: list[tuple[int, IntArray]], parts: list[_Part], uses: tuple[Use, ...]
    ) -> None:
        """Add a node per layout l with the states absent and present, which every reader of l requires to be present.

        Where rows use the transfer, there is a present state per layout that the source gives.
        """
        given = np.unique(have)
        for (reader, want), part in zip(readers, parts, strict=True):
            add_edge(self.edges, transfer.source, reader, part.rest[np.ix_(have, want)])
        for layout in np.unique(np.concatenate([want for _, want in readers])):
            if uses:
                made = tuple(use._replace(amount=np.append(0.0, use.amount[given, layout])) for use in uses)
                there = self._node(np.append(0.0, transfer.prices[given, layout]), made)
                paid = np.where(have[:, None] == given, 0.0, np.inf)
            else:
                there = self._node(np.zeros(2))
                paid = transfer.prices[have, layout][:, None]
            add_edge(self.edges, transfer.source, there, np.concatenate([np.zeros((len(have), 1)), paid], axis=1))
            for reader, want in readers:
                if (want == layout).any():
                    needs = np.where(want == layout, np.inf, 0.0)
                    add_edge(self.edges, there, reader, np.stack([needs, *np.zeros((paid.shape[1], len(want)))]))

    def _node(self, costs: FloatArray, uses: tuple[Use, ...] = ()) -> int:
        self.costs.append(costs)
        self._uses.append(uses)
        return len(self.costs) - 1


def _paid(amounts: FloatArray, states: IntArray) -> FloatArray:
    """Per state the sum of amounts (given, wanted) over the distinct wanted layouts; states: (states, 1 + readers), given first."""
    total = np.zeros(len(states))
    for column in range(1, states.shape[1]):
        new = (states[:, 1:column] != states[:, column, None]).all(axis=1)
        total += np.where(new, amounts[states[:, 0], states[:, column]], 0.0)
    return total


def _joint(
    prices: FloatArray, have: IntArray, wants: list[IntArray], parts: list[_Part], room: float
) -> tuple[IntArray, FloatArray] | None:
    """All joint choices (layout given, layout wanted by each reader) within the room, and their costs; None beyond MAX_JOINT of them."""
    states, floor = have[:, None], np.zeros(len(have))
    costs = floor
    for want, part in zip(wants, parts, strict=True):
        row, column = np.divmod(np.arange(len(states) * len(want)), len(want))
        given, layout = states[row, 0], want[column]
        floor = floor[row] + part.slack[given, layout]
        there = (states[row, 1:] == layout[:, None]).any(axis=1)
        costs = costs[row] + part.rest[given, layout] + np.where(there, 0.0, prices[given, layout])
        states = np.concatenate([states[row], layout[:, None]], axis=1)
        fits = np.flatnonzero((floor < room) & np.isfinite(costs))
        states, floor, costs = states[fits], floor[fits], costs[fits]
        if len(states) > MAX_JOINT:
            return None
    apart = any(part.apart for part in parts)
    fits = np.flatnonzero((costs + floor if apart else costs) < room)
    return states[fits], costs[fits]
