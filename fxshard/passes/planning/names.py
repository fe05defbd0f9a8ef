"""Resolves the user's names: an input, an output, the results of a submodule, a node, or a glob over one kind of these."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from fxshard.errors import ConstraintError, closest, count_text
from fxshard.graph.objects import call_result_spec
from fxshard.graph.planning_graph import PlanningGraph, is_tensor, operands, outputs_of
from fxshard.passes.planning.module_inputs import Readers, module_inputs

INPUTS = "inputs"
KINDS = "parameter, buffer, input, output, module or node"


@dataclass(frozen=True)
class Place:
    """A tensor of the graph: result ``output`` of ``node``, or the model's output number ``result``; with ``readers``, the tensor as these
    operands of nodes."""

    node: str
    output: int = 0
    result: int | None = None
    readers: Readers = ()

    def value(self, graph: PlanningGraph) -> torch.Tensor | None:
        return outputs_of(graph.by_name[self.node])[self.output]


@dataclass(frozen=True)
class Named:
    """One match of a name with its tensors; several if the node or module has several results.

    None stands for a result that is not a tensor, or that nothing reads and the graph therefore lacks.
    """

    what: str
    places: tuple[Place | None, ...]

    @property
    def count(self) -> str:
        """How many it has, in words: ``2 results``, ``1 input``."""
        inputs = any(place is not None and place.readers for place in self.places)
        return count_text(len(self.places), "input" if inputs else "result")

    def part(self, index: int) -> str:
        """Result or input ``index`` in words."""
        return f"{self.what}[{index}]" if self.what.endswith(f".{INPUTS}") else f"result {index} of {self.what}"


@dataclass(frozen=True)
class Names:
    """The names of a graph. A name or glob is looked up among inputs and outputs first, then modules, then nodes, then inputs of modules
    (``layers.0.mlp.inputs``)."""

    graph: PlanningGraph

    def find(self, name: str, what: str, where: str, several: bool = False) -> list[Named]:
        """The matches of ``name``: exact, as a glob (over nodes with one result unless ``several``), or ``[k]`` for result k.

        ``what`` and ``where`` word the ConstraintError that is raised if nothing matches.
        """
        found = self._find(name, several) or _indexed_result(name, partial(self._find, several=True))
        if not found:
            raise self._unmatched(name, what, where)
        return list(dict.fromkeys(found))

    def _unmatched(self, name: str, what: str, where: str) -> ConstraintError:
        part = re.fullmatch(r"(.+)\[(\d+)\]", name)
        whole, suffix = (part[1], f"[{part[2]}]") if part is not None else (name, "")
        if few := next(iter(self._find(whole, several=True)), None):
            names = [f"{whole}[{k}]" for k in range(len(few.places))]
            remedy = f"name {whole}" if len(names) == 1 else f"name one of {some(names)}"
            return ConstraintError(f"{what}{name!r}: {few.what} has {few.count}", where=where, remedy=remedy)
        module, dot, last = whole.rpartition(".")
        if dot and closest(last, [INPUTS]):
            modules = [_as_glob(one) if "*" in module else one for one in self._module_inputs]
            meant = closest(module, modules) and closest(whole, [f"{one}.{INPUTS}" for one in modules])
            kinds = KINDS if last != INPUTS else f"module whose {INPUTS} are read"
            remedy = f"name one of {some(f'{one}.{INPUTS}{suffix}' for one in modules)}"
            return ConstraintError(f"{what}{name!r} matches no {kinds}{meant}", where=where, remedy=remedy)
        parameters = (i.name for i in self.graph.inputs_of("parameter"))
        remedy = f"name one of {some([*parameters, *self.all])}"
        return ConstraintError(f"{what}{name!r} matches no {KINDS}{closest(name, self.all)}", where=where, remedy=remedy)

    def one(self, name: str, where: str) -> Place:
        """The one tensor that ``name`` means, in the first kind where it is unique; else a ConstraintError suggests names."""
        kinds = [table[name] for table in self._tables if name in table] or [_indexed_result(name, self._exactly)]
        for calls in kinds:
            if len(places := _distinct_places(calls)) == 1:
                return places[0]
        raise self._several(name, kinds[0], where) if kinds[0] else self._none(name, where)

    def _several(self, name: str, calls: Sequence[Named], where: str) -> ConstraintError:
        places = _distinct_places(calls)
        if not places:
            return ConstraintError(f"{name!r} gives no tensor that is read", where=where, remedy="name something that gives one")
        parts = [f"{name}[{k}]" for k, place in enumerate(calls[0].places) if place is not None]
        often = f", in {len(calls)} calls" if len(calls) > 1 else ""
        remedy = f"name one of {some(map(self.spelled, places) if often else parts)}"
        return ConstraintError(f"{name!r} means {len(places)} values{often}; one is asked for at a time", where=where, remedy=remedy)

    def _none(self, name: str, where: str) -> ConstraintError:
        for table in self._tables:
            if matching := [key for key in table if fnmatch.fnmatchcase(key, name)]:
                what = f"{name!r} is a glob; one value is asked for at a time"
                return ConstraintError(what, where=where, remedy=f"name one of {some(matching)}")
        what = f"there is no {KINDS} by the name of {name!r}{closest(name, self.all)}"
        return ConstraintError(what, where=where, remedy="name one that gives a tensor; fxshard.inspect.nodes_table(plan) lists the nodes")

    def spelled(self, place: Place) -> str:
        """The user's name of an input or output; for a node, its name, with ``[k]`` if it has several results."""
        if place.result is not None:
            return self.graph.outputs[place.result].name
        several = len(outputs_of(self.graph.by_name[place.node])) > 1
        own = f"{place.node}[{place.output}]" if several else place.node
        return next((i.name for i in self.graph.inputs if i.node == place.node), own)

    def means_something(self, name: str) -> bool:
        part = re.fullmatch(r"(.+)\[(\d+)\]", name)
        return bool(self._find(name, several=True) or (part is not None and self._find(part[1], several=True)))

    def _exactly(self, name: str) -> Sequence[Named]:
        return next((table[name] for table in self._tables if name in table), ())

    def _find(self, name: str, several: bool) -> Sequence[Named]:
        if found := self._exactly(name):
            return found
        for table in self._tables:
            nodes = table is self._tables[-1]
            named = [n for key, found in table.items() if fnmatch.fnmatchcase(key, name) for n in found]
            kept = [n for n in named if several or not nodes or is_tensor(self.graph.by_name[n.what])]
            if kept:
                return kept
        module, dot, last = name.rpartition(".")
        return [n for key, n in self._module_inputs.items() if fnmatch.fnmatchcase(key, module)] if last == INPUTS and dot else ()

    def names_inputs(self, name: str) -> bool:
        """Whether a name, without an index at its end, means inputs of modules."""
        found = self._find(re.sub(r"\[\d+\]$", "", name), several=True)
        return any(place is not None and place.readers for named in found for place in named.places)

    @cached_property
    def _module_inputs(self) -> Mapping[str, Named]:
        return {
            module: Named(f"{module}.{INPUTS}", tuple(Place(value, readers=readers) for value, readers in values.items()))
            for module, values in module_inputs(self.graph).items()
        }

    @property
    def all(self) -> list[str]:
        return [name for table in self._tables for name in table]

    @cached_property
    def _tables(self) -> tuple[Mapping[str, Sequence[Named]], ...]:
        graph = self.graph
        ends = {i.name: [Named(i.node, (Place(i.node),))] for i in graph.inputs}
        ends |= {alias: ends[target] for alias, target in graph.aliases.items() if target in ends}
        returned = operands(graph.module.graph.output_node())
        for index, (end, node) in enumerate(zip(graph.outputs, returned, strict=True)):
            if end.kind == "output":
                ends[end.name] = [Named(end.name, (Place(node.name, 0, index),))]
        modules = {
            name: [Named(f"the call of {name}", tuple(Place(node) if node else None for node in call)) for call in calls]
            for name, calls in graph.returned.items()
        }
        nodes = {
            n.name: [Named(n.name, tuple(None if v is None else Place(n.name, k) for k, v in enumerate(outputs_of(n))))]
            for n in graph.nodes
            if n.op != "output" and outputs_of(n)
        }
        return ends, modules, nodes


def by_end(given: Mapping[str, Any], graph: PlanningGraph, kind: str) -> dict[str, Any]:
    """Renames the keys of ``given`` to the graph's inputs or outputs; keys may be globs (``*`` and ``?``) or paths in objects.

    An output inside an object can also be named by its path: ``outputs['past_key_values'].layers[0].keys``, or by that of the argument that
    holds it. Keys that match nothing stay unchanged.
    """
    ends = graph.inputs_of("input") if kind == "input" else [o for o in graph.outputs if o.kind == "output"]
    after = call_result_spec(graph.out_spec)
    others = {} if after is None or kind == "input" else {f"outputs[{i}]": path for i, path in enumerate(after.paths)}
    found: dict[str, Any] = {}
    for key, value in given.items():
        glob = key.replace("[", "[[]")
        exact = [end.name for end in ends if key in (end.name, others.get(end.name))]
        names = exact or [e.name for e in ends if any(fnmatch.fnmatchcase(n, glob) for n in (e.name, others.get(e.name, "")))]
        found.update(dict.fromkeys(names or [key], value))
    return found


def _indexed_result(name: str, find: Callable[[str], Sequence[Named]]) -> list[Named]:
    """Reads ``whole[k]``: result k of each match that ``find`` returns for the name ``whole``."""
    part = re.fullmatch(r"(.+)\[(\d+)\]", name)
    if part is None:
        return []
    index = int(part[2])
    whole = [named for named in find(part[1]) if len(named.places) > index]
    return [Named(named.part(index), named.places[index : index + 1]) for named in whole]


def _as_glob(module: str) -> str:
    """``layers.*.mlp`` for ``layers.0.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _distinct_places(calls: Iterable[Named]) -> list[Place]:
    return list(dict.fromkeys(place for call in calls for place in call.places if place is not None))


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few of ``names`` and the number of the others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")
