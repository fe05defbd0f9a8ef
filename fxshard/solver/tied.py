"""Plans of repeated structure: nodes that are alike, *tied* to choose alike, are one node of a model many times smaller.

A deep model is one layer again and again. Nodes are alike where costs, tables and transfers around them are the same, some links far
(colour refinement: Weisfeiler and Leman, 1968): the middles of a stack of layers fall together, and its ends do not. What is best of the
plans in which they choose alike is found in a fraction of the time, and is most often nearly best of all. It is a plan to begin with,
and no bound; all choices stay free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import IntArray
from .budget import Budget
from .core import Cases, search_cores
from .infeasible import Exhausted
from .local_search import greedy
from .model import Model, Pair, add_edge
from .relax import Relaxation
from .scaling import quantise
from .transfers import Transfer, Transfers

FEWER = 16
"""A tied model has at most one node for so many."""

WORK, PART = 1e9, 0.1
"""Table entries that its search may touch, and how much of what is left."""

CORE_WORK = 1e8
"""Table entries that the search of each of its cores may touch."""


@dataclass(frozen=True)
class Tied:
    """model: a node for each class, at its number, and after them such as repeat one; a plan costs what `expand` of it costs in the whole.

    of: (nodes of the whole,) the class of each.
    """

    model: Model
    of: IntArray

    def expand(self, choices: IntArray) -> IntArray:
        """The plan of the whole in which all members of each class choose as it does."""
        return choices[self.of]


def search_tied(relaxation: Relaxation, search: Cases, budget: Budget) -> bool:
    """Offer the best plan found of those in which nodes that are alike choose alike; whether there is one, of a model without rows.

    None where too few nodes are alike.
    """
    ascent = relaxation.ascent
    classes = classes_of(ascent.model, len(ascent.model) // FEWER)
    plan = None if classes is None else _best(tie(ascent.model, classes), ascent.model.grain, search, _part(budget))
    if plan is not None:
        ascent.suggest(plan)
    return plan is not None


def _best(tied: Tied, grain: float, search: Cases, budget: Budget) -> IntArray | None:
    """The best plan found of a tied model, as one of the whole. grain: the least improvement of it that is worth anything."""
    start = greedy(tied.model)
    model, scale = quantise(tied.model, np.inf if start is None else tied.model.evaluate(start))
    try:
        relaxation = Relaxation(replace(model, grain=max(1.0, float(np.floor(grain * scale.factor)))), start, budget)
    except Exhausted:
        return None
    search_cores(relaxation, search, budget, CORE_WORK)
    return None if relaxation.choices is None else tied.expand(relaxation.choices)


def _part(budget: Budget) -> Budget:
    """What the search of one tied model may take of what is left."""
    seconds, work = budget.seconds_left, budget.work_left
    return Budget(None if seconds is None else PART * seconds, WORK if work is None else min(WORK, PART * work), budget)


def classes_of(model: Model, most: int) -> IntArray | None:
    """(nodes,) the class of each, refined while there are at most so many; None where there are more from the first."""
    colours, classes = _Colours(model), None
    while colours.count <= most:
        classes = colours.of
        if not colours.refine():
            break
    return classes


def tie(model: Model, of: IntArray) -> Tied:
    """The model without its rows, with one node for each class. of: (nodes,) their classes, each of nodes with the same costs."""
    names, writer = _Names(), _Writer(model, of)
    edges = Counter((int(of[i]), int(of[j]), names.of(table)) for (i, j), table in model.edges.items())
    for (i, j, table), count in edges.items():
        writer.edge(i, j, count * names.array(table))
    alike: dict[tuple[Hashable, ...], Transfer] = {}
    times: Counter[tuple[Hashable, ...]] = Counter()
    for transfer in model.transfers:
        source, readers = int(of[transfer.source]), {(int(of[node]), names.of(want)): want for node, want in transfer.readers}
        key: tuple[Hashable, ...] = (names.of(transfer.prices), source, names.of(transfer.have), *sorted(readers))
        alike[key] = replace(transfer, source=source, readers=tuple((node, want) for (node, _), want in readers.items()))
        times[key] += 1
    multiples: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
    for key, transfer in alike.items():
        number = names.of(transfer.prices), times[key]
        prices = multiples.setdefault(number, number[1] * transfer.prices)  # the same array where it was, so that tables are kept once
        writer.transfer(replace(transfer, prices=prices))
    return Tied(writer.finish(), of)


class _Writer:
    """The tied model as it grows."""

    def __init__(self, model: Model, of: IntArray) -> None:
        self._model = model
        classes, first, counts = np.unique(of, return_index=True, return_counts=True)
        self._costs = [count * model.costs[node] for node, count in zip(first, counts, strict=True)]
        self._edges: dict[Pair, npt.NDArray[np.float64]] = {}
        self._transfers: list[Transfer] = []
        self._twins: dict[int, int] = {}
        assert len(classes) == 0 or classes[-1] == len(classes) - 1

    def edge(self, i: int, j: int, table: npt.NDArray[np.float64]) -> None:
        """A table between two classes, or between members of one."""
        if i == j:
            self._costs[i] = self._costs[i] + np.diagonal(table)
        else:
            add_edge(self._edges, i, j, table)

    def transfer(self, transfer: Transfer) -> None:
        """A value. A reader of the class of its source is a cost of that class where it is the only one, else a node that repeats it."""
        source, readers = transfer.source, transfer.readers
        if len(readers) == 1 and readers[0][0] == source:
            self._costs[source] = self._costs[source] + transfer.prices[transfer.have, readers[0][1]]
            return
        others = tuple((self._twin(node) if node == source else node, want) for node, want in readers)
        self._transfers.append(replace(transfer, readers=others))

    def finish(self) -> Model:
        """All of it."""
        return Model(
            self._costs,
            self._edges,
            [()] * len(self._costs),
            np.zeros(0),
            constant=self._model.constant,
            transfers=Transfers(self._transfers),
        )

    def _twin(self, node: int) -> int:
        """A node that chooses as this one."""
        if node not in self._twins:
            states = len(self._costs[node])
            self._twins[node] = len(self._costs)
            self._costs.append(np.zeros(states))
            self._edges[node, self._twins[node]] = np.where(np.eye(states, dtype=np.bool_), 0.0, np.inf)
        return self._twins[node]


class _Colours:
    """Colours of nodes. of: (nodes,) numbers from 0, `count` of them."""

    def __init__(self, model: Model) -> None:
        names = _Names()
        self._edges = [(i, j, names.of(table)) for (i, j), table in model.edges.items()]
        self._transfers = [
            (names.of(t.prices), t.source, names.of(t.have), [(node, names.of(want)) for node, want in t.readers]) for t in model.transfers
        ]
        self._set([names.of(cost) for cost in model.costs])

    def refine(self) -> bool:
        """Tell nodes apart by the colours of those around them; whether there are more colours now."""
        colour, before = self.of.tolist(), self.count
        around: list[list[Hashable]] = [[] for _ in colour]
        for i, j, table in self._edges:
            around[i].append((0, table, colour[j]))
            around[j].append((1, table, colour[i]))
        for prices, source, have, readers in self._transfers:
            whole = hash((prices, have, colour[source], tuple(sorted((want, colour[node]) for node, want in readers))))
            around[source].append((2, have, whole))
            for node, want in readers:
                around[node].append((3, want, whole))
        self._set([(own, tuple(sorted(seen))) for own, seen in zip(colour, around, strict=True)])  # type: ignore[type-var]
        return self.count > before

    def _set(self, colours: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.of = np.asarray([numbers.setdefault(colour, len(numbers)) for colour in colours], dtype=np.int64)
        self.count = len(numbers)


class _Names:
    """Numbers of arrays, the same for equal ones."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[npt.NDArray[Any], int]] = {}  # arrays are kept: another may not get the id of one that is gone
        self._numbers: dict[Hashable, int] = {}
        self._arrays: list[npt.NDArray[Any]] = []

    def of(self, array: npt.NDArray[Any]) -> int:
        """The number of an array."""
        if id(array) not in self._known:
            number = self._numbers.setdefault((array.shape, array.tobytes()), len(self._numbers))
            self._arrays += [array] * (number == len(self._arrays))
            self._known[id(array)] = array, number
        return self._known[id(array)][1]

    def array(self, number: int) -> npt.NDArray[Any]:
        """The first array of a number."""
        return self._arrays[number]
