"""Exploit repeated layers: nodes of the same class are *tied* to the same choice, which gives a much smaller model.

Nodes are in one class if the costs, tables and transfers around them are equal up to some distance (colour refinement: Weisfeiler and
Leman, 1968). The middle layers of a stack fall together; its ends do not. The best plan with tied choices is found in a fraction of the
time and is usually nearly optimal. The search of the whole model starts from that plan and its messages (`tied_messages`), with all choices
free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.tied_messages import initialise_from_tied
from fxshard.solver.primal.local_search import greedy
from fxshard.solver.problem.arrays import FloatArray, IntArray, each
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, add_edge
from fxshard.solver.problem.row_uses import Use
from fxshard.solver.problem.transfers import Transfer, Transfers
from fxshard.solver.search.core_problem import Cases, is_large, search_cores

LINKS = 3
"""The distance, in links, up to which surroundings are compared: enough to distinguish the positions within a layer."""

FEW_LINKS = 2
"""The same for models with cheap sweeps."""

FIRST_PAIRS = 8
"""Pairs of sweeps over the whole model for its bound alone, before plans are decoded from them."""

MOST_CLASSES = 0.5
"""The most nodes of a tied model, as a fraction of the whole model's; a larger one is not worth its search."""

WORK, PART = 1e9, 0.1
"""Work of searching the tied model, in table entries and as a fraction of the remaining budget."""

CORE_WORK = 1e8
"""Work of searching each of its cores, in table entries."""

Reader = tuple[int, int]
"""(class, identifier of the array of layouts that it wants)."""

Key = tuple[int, int, int, tuple[Reader, ...], tuple[int, ...]]
"""Key of equal transfers: identifiers of the prices, the source's class, identifier of the layouts given, the readers, those of the amounts
in rows."""


@dataclass(frozen=True)
class Tied:
    """A tied model. Its plans cost what their expansions cost in the whole model.

    model: one node per class, in order, then copies of some of these. of: (nodes of the whole,) the class of each. links: (links of the
    whole,) the tied link of each, -1 for none; links are numbered as in `links.Splits`: edges, then readers transfer by transfer.
    """

    model: Model
    of: IntArray
    links: IntArray

    def expand(self, choices: IntArray) -> IntArray:
        """The plan of the whole in which every node makes the choice of its class."""
        return choices[self.of]


def search_tied(relaxation: Relaxation, search: Cases, budget: Budget) -> bool:
    """Start a relaxation from the best plan and the messages of its tied model; only for models without limits.

    Returns whether a plan was found; False also where the tied model would not be much smaller.
    """
    ascent = relaxation.ascent
    if len(ascent.model.limits) or _least(ascent.model) >= ascent.cutoff:
        return False
    classes = classes_of(ascent.model, LINKS if is_large(relaxation) else FEW_LINKS)
    if classes.max(initial=-1) >= MOST_CLASSES * len(classes):
        return False
    tied = tie(ascent.model, classes)
    try:
        smaller = Relaxation(tied.model, greedy(tied.model), budget.share(PART).part(WORK))
    except Exhausted:
        return False
    if is_large(relaxation):
        search_cores(smaller, search, smaller.ascent.budget, CORE_WORK)
    else:
        smaller.run()
    if smaller.choices is None:
        return False
    if not budget.spent and [len(costs) for costs in smaller.ascent.model.costs] == [len(costs) for costs in tied.model.costs]:
        initialise_from_tied(smaller.ascent.sweeper, ascent.sweeper, tied.of, tied.links)
        budget.charge(ascent.sweeper.entries)
    ascent.suggest(tied.expand(smaller.choices))
    ascent.prove(FIRST_PAIRS)
    return True


def _least(model: Model) -> float:
    """A lower bound: the constant and the least cost of every node."""
    return model.constant + sum(each(model.costs, lambda cost: float(cost.min())))


def classes_of(model: Model, links: int) -> IntArray:
    """(nodes,) the class of each node by its costs and its surroundings up to this many links away."""
    colours = _Colours(model)
    for _ in range(links):
        colours.refine()
    return colours.of


def tie(model: Model, classes: IntArray) -> Tied:
    """The tied model, with the model's rows. classes: (nodes,) the class of each; the nodes of a class have equal costs.

    A reader in the source's class becomes a cost of that class if it is the only reader, else a *twin* of its node, tied to the same choice
    by an edge. A twin comes right after its node, so that later choices are decoded given both.
    """
    names = _Names()
    parts = _parts(model, classes, names)
    twins = np.unique(np.asarray([key[1] for key, _ in parts if len(key[3]) > 1 and key[1] in dict(key[3])], dtype=np.int64))
    of = classes + np.searchsorted(twins, classes)
    writer = _Writer(model, of, {int(k + before): int(k + before + 1) for before, k in enumerate(twins)})
    edges = [(int(of[i]), int(of[j]), names.of(table)) for (i, j), table in model.edges.items()]
    for (i, j, table), count in Counter(edges).items():
        writer.edge(i, j, count * names.array(table))
    parts = _parts(model, of, names)
    alike = {key: transfer for (key, _), transfer in zip(parts, model.transfers, strict=True)}
    moved: dict[Key, list[Use]] = {}
    for (key, _), uses in zip(parts, _moved(model), strict=True):
        moved.setdefault(key, []).extend(uses)
    times = Counter(key for key, _ in parts)
    multiples: dict[tuple[int, int], FloatArray] = {}
    for key, transfer in alike.items():
        prices = multiples.setdefault((key[0], times[key]), times[key] * transfer.prices)  # equal tables stay one shared array
        readers = tuple((node, names.array(want)) for node, want in key[3])
        writer.transfer(key, replace(transfer, source=key[1], readers=readers, prices=prices), moved[key])
    places = {pair: place for place, pair in enumerate(writer.edges)}
    links = [places.get((min(i, j), max(i, j)), -1) for i, j, _ in edges]
    links += [writer.place_of(key, reader) for key, readers in parts for reader in readers]
    return Tied(writer.finish(), of, np.asarray(links, dtype=np.int64))


def _parts(model: Model, of: IntArray, names: _Names) -> list[tuple[Key, list[Reader]]]:
    """The key of each transfer, and its readers."""
    found = []
    for transfer, uses in zip(model.transfers, _moved(model), strict=True):
        readers = [(int(of[node]), names.of(want)) for node, want in transfer.readers]
        given = names.of(transfer.prices), int(of[transfer.source]), names.of(transfer.have)
        found.append(((*given, tuple(sorted(set(readers))), _amounts(names, uses)), readers))
    return found


def _moved(model: Model) -> Sequence[tuple[Use, ...]]:
    """The uses of each transfer."""
    return model.moved or [()] * len(model.transfers)


class _Writer:
    """The tied model under construction. of: (nodes,) the tied node of each. twins: node -> its twin, which has no members."""

    def __init__(self, model: Model, of: IntArray, twins: Mapping[int, int]) -> None:
        self._model, self._twins = model, twins
        members, first, counts = np.unique(of, return_index=True, return_counts=True)
        made = {int(k): count * model.costs[node] for k, node, count in zip(members, first, counts, strict=True)}
        made |= {twin: np.zeros_like(made[node]) for node, twin in twins.items()}
        self._costs = [made[node] for node in range(len(made))]
        self._uses: list[list[Use]] = [[] for _ in self._costs]
        for node, uses in zip(of.tolist(), model.uses, strict=True):
            self._uses[node].extend(uses)
        self.edges: dict[Pair, FloatArray] = {
            (node, twin): np.where(np.eye(len(made[node]), dtype=np.bool_), 0.0, np.inf) for node, twin in twins.items()
        }
        self._transfers: list[Transfer] = []
        self._moved: list[tuple[Use, ...]] = []
        self._links: dict[Key, int] = {}
        self._readers = 0

    def edge(self, i: int, j: int, table: FloatArray) -> None:
        """Add a table between two classes, or between members of one class."""
        if i == j:
            self._costs[i] = self._costs[i] + np.diagonal(table)
        else:
            add_edge(self.edges, i, j, table)

    def transfer(self, key: Key, transfer: Transfer, uses: Sequence[Use]) -> None:
        """Add a transfer, with its uses."""
        source, readers = transfer.source, transfer.readers
        if len(readers) == 1 and readers[0][0] == source:
            own = transfer.have, readers[0][1]
            self._costs[source] = self._costs[source] + transfer.prices[own]
            self._uses[source].extend(use._replace(amount=use.amount[own]) for use in uses)
            return
        others = tuple((self._twins[node] if node == source else node, want) for node, want in readers)
        self._transfers.append(replace(transfer, readers=others))
        self._moved.append(tuple(uses))
        self._links[key] = self._readers
        self._readers += len(readers)

    def finish(self) -> Model:
        """The complete model."""
        uses, moved = [tuple(terms) for terms in self._uses], tuple(self._moved) if self._model.moved else ()
        whole = replace(self._model, costs=self._costs, edges=self.edges, uses=uses, cutoff=np.inf)
        return replace(whole, transfers=Transfers(self._transfers), moved=moved)

    def place_of(self, key: Key, reader: Reader) -> int:
        """The index of a reader's link, once all edges were added; -1 for a reader in the source's class."""
        return -1 if reader[0] == key[1] else len(self.edges) + self._links[key] + key[3].index(reader)


class _Colours:
    """Colour refinement. of: (nodes,) the colour of each node, numbered from 0."""

    def __init__(self, model: Model) -> None:
        names = _Names()
        self._edges = [(i, j, names.of(table)) for (i, j), table in model.edges.items()]
        self._transfers = [
            ((names.of(t.prices), _amounts(names, uses)), t.source, names.of(t.have), [(node, names.of(want)) for node, want in t.readers])
            for t, uses in zip(model.transfers, _moved(model), strict=True)
        ]
        self._set([(names.of(cost), _amounts(names, uses)) for cost, uses in zip(model.costs, model.uses, strict=True)])

    def refine(self) -> None:
        """Refine the colours by those of adjacent nodes."""
        colour = self.of.tolist()
        around: list[list[tuple[int, int, int]]] = [[] for _ in colour]
        for i, j, table in self._edges:
            around[i].append((0, table, colour[j]))
            around[j].append((1, table, colour[i]))
        for prices, source, have, readers in self._transfers:
            whole = hash((prices, have, colour[source], tuple(sorted((want, colour[node]) for node, want in readers))))
            around[source].append((2, have, whole))
            for node, want in readers:
                around[node].append((3, want, whole))
        self._set([(own, tuple(sorted(seen))) for own, seen in zip(colour, around, strict=True)])

    def _set(self, colours: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.of = np.asarray([numbers.setdefault(colour, len(numbers)) for colour in colours], dtype=np.int64)


def _amounts(names: _Names, uses: Sequence[Use]) -> tuple[int, ...]:
    """Identifiers of what uses count in rows; in which rows does not matter."""
    return tuple(names.of(use.amount) for use in uses)


class _Names:
    """Identifiers of arrays; equal arrays have the same one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[npt.NDArray[Any], int]] = {}  # holds the arrays, so that no id is reused
        self._numbers: dict[Hashable, int] = {}
        self._arrays: list[npt.NDArray[Any]] = []

    def of(self, array: npt.NDArray[Any]) -> int:
        """The identifier of an array."""
        if id(array) not in self._known:
            number = self._numbers.setdefault((array.shape, array.tobytes()), len(self._numbers))
            self._arrays += [array] * (number == len(self._arrays))
            self._known[id(array)] = array, number
        return self._known[id(array)][1]

    def array(self, number: int) -> npt.NDArray[Any]:
        """The first array with this identifier."""
        return self._arrays[number]
