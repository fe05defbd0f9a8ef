"""Sequential tree-reweighted message passing (TRW-S).

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (PAMI 2006). All numbers are integers in float64, and
messages are capped so that sums stay below 2^53. The bound is therefore exact; it is valid for any messages and for any split of shared
prices (`links.Splits`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fxshard.solver.bounds import sweep_kernels as kernels
from fxshard.solver.bounds.links import Link, Splits
from fxshard.solver.bounds.sweep_kernels import Messages, Wiring
from fxshard.solver.problem.arrays import BoolArray, FloatArray, IntArray, each, starts
from fxshard.solver.problem.model import Model


class Tables(Protocol):
    """The links of a model and their tables: `links.Splits`, or `merged_links.MergedLinks`."""

    links: list[Link]
    start: IntArray
    own: IntArray
    shared: IntArray
    values: FloatArray

    @property
    def rates(self) -> FloatArray: ...
    def table(self, index: int, values: FloatArray | None = None) -> FloatArray: ...
    def price(self, rates: FloatArray) -> None: ...
    def rebalance(self, slack: FloatArray) -> None: ...


class Sweeper:
    """The messages of one model, with the bounds and plans that they give.

    weights: S (states,), node costs plus all incoming messages. Direction 0 runs in node order, direction 1 against it. A message is one
    number per class of its receiver's states.
    """

    def __init__(self, model: Model, links: Tables | None = None) -> None:
        """links: other links of the model than those that `Splits` makes."""
        self.model = model
        sizes = np.asarray([len(cost) for cost in model.costs], dtype=np.int64)
        self.splits: Tables = Splits(model) if links is None else links
        self.links = self.splits.links
        self.wiring = _wire(sizes, self.links, self.splits)
        self.offset = self.wiring.offset
        allowed = all(each(model.costs, lambda cost: bool(np.isfinite(cost).all())))
        assert allowed, "a state has cost inf: messages would prove nothing"
        self.theta = np.concatenate([*model.costs, np.zeros(0)])
        self.weights = self.theta.copy()
        self.messages = [np.zeros(int(self.wiring.message[d, -1])) for d in (0, 1)]
        degrees = np.diff(self.wiring.first, axis=1)
        self.chains = np.maximum(degrees.max(axis=0), 1).astype(np.float64)
        most = int(degrees.sum(axis=0).max(initial=0))
        self.cap = float(2 ** int(51 - np.ceil(np.log2(most + 2))))
        self._share = 1.0 / self.chains
        self._slack = np.zeros(len(self.splits.values))
        self.entries = len(self.theta) + int(self.splits.own[-1])
        """Entries that the last sweep read."""
        self.decoded_entries = 2 * (len(self.theta) + len(self.wiring.classes))
        """Entries that decoding reads: one row of each table."""

    def set_costs(self, theta: FloatArray, rates: FloatArray) -> None:
        """Replace the node costs (states,) and the rates of the uses of transfers (uses,) for other multipliers; messages and forbidden
        states stay."""
        left = np.isfinite(self.theta)
        self.weights[left] += theta[left] - self.theta[left]
        self.theta[left] = theta[left]
        if len(rates):
            self.splits.price(rates)

    def allow(self, allowed: BoolArray) -> None:
        """Allow only the states marked (states,), until `restore` brings back an earlier state; bounds then hold for these states only."""
        self.theta[~allowed] = np.inf
        self.weights[~allowed] = np.inf

    def state(self) -> tuple[FloatArray, ...]:
        """Copies of costs, messages and splits, for `restore`."""
        return tuple(array.copy() for array in self._arrays())

    def restore(self, state: tuple[FloatArray, ...]) -> None:
        """Return to a state saved by `state`."""
        for array, before in zip(self._arrays(), state, strict=True):
            array[:] = before

    def _arrays(self) -> tuple[FloatArray, ...]:
        return self.theta, self.weights, *self.messages, self.splits.values, self.splits.rates

    def sweep(self, direction: int) -> float:
        """Update all messages in one direction, and after direction 1 the splits; returns the bound, `inf` if no choice is allowed."""
        sent, back, values = self.messages[direction], self.messages[1 - direction], self.splits.values
        total, read = kernels.sweep(self.wiring, direction, values, self.weights, sent, back, self._share, self.cap, self._slack)
        self.entries = read
        if direction and np.isfinite(total):
            self.splits.rebalance(self._slack)
        return self.model.constant + total

    def decode(self, direction: int, consistent: bool = False) -> IntArray | None:
        """Choices made node by node in a direction, each given the earlier choices and the messages of the later nodes; None where that
        leaves a node without an allowed state, which arc consistency makes rare."""
        choices = np.zeros(len(self.model), dtype=np.int64)
        found = kernels.decode(self.wiring, direction, self.splits.values, self.weights, self.messages[direction], choices, consistent)
        return choices if found else None

    def slacks(self) -> tuple[FloatArray, FloatArray]:
        """After a sweep of direction 1: the reparameterised tables of all links, and node costs (states,).

        Both are nonnegative up to constants. With the surcharges of transfers (prices less splits) they add up to the model's cost.
        """
        tables = np.empty(int(self.splits.own[-1]))
        return tables, kernels.slacks(self.wiring, self._at(), tables, np.empty(len(self.links)))

    def least_slacks(self) -> tuple[FloatArray, FloatArray]:
        """As `slacks`, with only the least entry of each table, (links,)."""
        least = np.empty(len(self.links))
        room = np.empty(int(np.diff(self.splits.own).max(initial=0)))
        return least, kernels.slacks(self.wiring, self._at(), room, least)

    def excess(self, least: FloatArray, kept: FloatArray) -> FloatArray:
        """(states,) the least cost of each state above the minima of all links and nodes: see `kernels.collect`."""
        return kernels.collect_brief(self.wiring, self._at(), least, kept, self.chains)

    def _at(self) -> Messages:
        return Messages(self.splits.values, self.weights, self.messages[0], self.messages[1], self._share)


def _wire(sizes: IntArray, links: list[Link], splits: Tables) -> Wiring:
    """The links as flat arrays."""
    ends = np.asarray([link.ends for link in links], dtype=np.int64).reshape(-1, 2).T.copy()
    shapes = np.asarray([link.shape for link in links], dtype=np.int64).reshape(-1, 2).T.copy()
    parts = [link.classes(end) for link in links for end in (0, 1)]
    start = starts([len(part) for part in parts])[:-1].reshape(-1, 2).T.copy()
    count = len(sizes)
    return Wiring(
        starts(sizes),
        ends,
        shapes,
        splits.start,
        splits.own,
        np.concatenate([*parts, np.zeros(0, dtype=np.int64)]),
        start,
        np.stack([starts(shapes[1]), starts(shapes[0])]),
        np.stack([starts(np.bincount(side, minlength=count)) for side in ends]),
        np.stack([np.argsort(side, kind="stable") for side in ends]),
        splits.shared,
    )
