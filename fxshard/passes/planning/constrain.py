"""The user's constraints in one form: conditions on the layouts of values and results, equalities, and limits.

The user gives them by name (``names``), as layouts, as values of ``fxshard.plans.constraints``, or as a partial plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.byte_sizes import read_size
from fxshard.cost.host import check_host
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.errors import ConstraintError, LayoutError, OptionError, a_kind, closest, count_text
from fxshard.graph.objects import is_length
from fxshard.graph.planning_graph import PlanningGraph, is_getitem, operands, outputs_of, planned_nodes, producer, source_line
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.packing import packings_of
from fxshard.passes.memory.offload import Offloading
from fxshard.passes.planning.names import Named, Names, Place, by_end, some
from fxshard.passes.planning.parallel_axes import AxisCondition, axis_conditions, warn_of_overruled, warn_of_unmatched
from fxshard.passes.planning.patterns import Condition, Pattern, on_several_ranks, pattern, read_pattern, says_nothing
from fxshard.plans.constraints import Communication, Constraint, Equal, Forbid, Held, check_constraints, shown
from fxshard.plans.offload import read_offload
from fxshard.plans.parallel import Parallel
from fxshard.plans.plan_data import OpSpec, again
from fxshard.plans.sharding_plan import ShardingPlan

log = logging.getLogger("fxshard")


@dataclass(frozen=True)
class Equality:
    """Tensors that must have equal layouts, and the user's text."""

    places: tuple[Place, ...]
    user_text: str


@dataclass(frozen=True)
class Constraints:
    """``values``: node (placeholder, call or getitem) -> conditions on its layout; ``results``: output index -> conditions on the layout in
    which it is returned; ``specs``: node -> its required OpSpec (empty inputs leave them free); ``reads``: node -> conditions on the
    layouts in which it reads operands, by their index."""

    values: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    results: Mapping[int, tuple[Condition, ...]] = field(default_factory=dict)
    specs: Mapping[str, OpSpec] = field(default_factory=dict)
    memory_limit: int | None = None
    equal: tuple[Equality, ...] = ()
    communication: tuple[Communication, ...] = ()
    optimizer: Optimizer = field(default_factory=Optimizer)
    recomputed: frozenset[str] = frozenset()
    """Blocks that must be recomputed, whether that saves memory or not."""
    reads: Mapping[str, tuple[tuple[int, Condition], ...]] = field(default_factory=dict)
    offload: Offloading = field(default_factory=Offloading)
    returned_whole: frozenset[str] = frozenset()
    """Inputs whose gradients and new values are returned replicated, in whichever layout the inputs are: those of plain tensors."""


def constraints_of(
    graph: PlanningGraph,
    mesh: Mesh,
    *,
    input_layouts: Any = None,
    output_layouts: Any = None,
    pins: Mapping[str, Any] | ShardingPlan | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Constraint] | None = None,
    optimizer: Any = None,
    parallel: Parallel | None = None,
    offload: Any = None,
    returned_whole: frozenset[str] = frozenset(),
) -> Constraints:
    """Reads the user's constraints; raises ConstraintError for names that match nothing and LayoutError for bad layouts."""
    reader = _Reader(graph, mesh)
    reader.read_inputs(input_layouts)
    reader.read_outputs(output_layouts)
    specs: Mapping[str, OpSpec] = {}
    if isinstance(pins, ShardingPlan):
        specs = _plan_pins(graph, mesh, pins)
        returned_whole |= _returned_whole(graph, specs)
        for name, condition in _follow_inputs(graph, specs, returned_whole):
            reader.add(Place(name), condition)
    elif not isinstance(pins or {}, Mapping) or not all(isinstance(name, str) for name in pins or {}):
        remedy = "give {'layers.*.weight': 'RS(0)'}, or a ShardingPlan"
        raise OptionError(f"cannot read pins={pins!r}: names (text) and their layouts are needed", where="pins", remedy=remedy)
    else:
        for name, layout in (pins or {}).items():
            reader.read_pin(_UserText(name, f"pins[{name!r}]"), layout)
    for one in check_constraints(constraints):
        reader.read(one)
    reader.read_words(parallel or {})
    limit = None if memory_limit is None else int(read_size(memory_limit, "memory_limit"))
    kept = Optimizer.of(optimizer)
    redone = frozenset(pins.recomputed) if isinstance(pins, ShardingPlan) else frozenset()
    said = (tuple(reader.equal), tuple(reader.communication), kept, redone)
    others = reader.reads, _offloading(graph, mesh, offload, pins), returned_whole
    return Constraints(reader.values, reader.results, specs, limit, *said, *others)


def _offloading(graph: PlanningGraph, mesh: Mesh, given: Any, pins: Any) -> Offloading:
    """``given``: kinds, as in ``fxshard.plan``; or what is on the host, by name of the parameter, which a plan given as pins says too."""
    fixed = given if isinstance(given, Mapping) else None
    nodes = {end.name: end.node for end in graph.inputs_of("parameter")}
    if fixed is not None:
        known = {nodes[name]: kind for name, kind in fixed.items() if name in nodes}
    elif isinstance(pins, ShardingPlan) and not pins.partial:
        known = dict(pins.on_host)
    else:
        known = None
    found = Offloading(() if fixed is not None else read_offload(given), known)
    if found.kinds or found.fixed:
        check_host(mesh.hardware)
    return found


@dataclass(frozen=True)
class _UserText:
    """A name and where the user wrote it: an entry of ``pins`` (messages append the layout) or a ``whole`` constraint."""

    name: str
    text: str
    whole: bool = False

    def of(self, layout: Any, part: str = "") -> str:
        if isinstance(layout, Held):
            return layout.text(self.name, self.text.partition("[")[0])
        return self.text if self.whole else f"{self.text}{part}={shown(layout)}"


@dataclass
class _Reader:
    """Collects the constraints read so far; fields as in ``Constraints``."""

    graph: PlanningGraph
    mesh: Mesh
    values: dict[str, tuple[Condition, ...]] = field(default_factory=dict)
    results: dict[int, tuple[Condition, ...]] = field(default_factory=dict)
    equal: list[Equality] = field(default_factory=list)
    communication: list[Communication] = field(default_factory=list)
    reads: dict[str, tuple[tuple[int, Condition], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Names(self.graph)
        self.held: dict[str, Layout] = {}  # node -> the layout of a DTensor, of which the user could say otherwise

    def add(self, place: Place, condition: Condition) -> None:
        if place.readers:
            for node, operand in place.readers:
                self.reads[node] = (*self.reads.get(node, ()), (operand, condition))
        elif place.result is None:
            self.values[place.node] = (*self.values.get(place.node, ()), condition)
        else:
            self.results[place.result] = (*self.results.get(place.result, ()), condition)

    def read_inputs(self, given: Any) -> None:
        nodes = {i.name: i.node for i in self.graph.inputs_of("input")}
        for name in [name for name, node in nodes.items() if is_length(self.graph.by_name[node].meta["val"])]:
            whole = Layout.replicated(self.mesh.ndim)  # a length passed to the call: to users it is not a tensor
            self._add_layout(Place(nodes.pop(name)), whole, f"input {name}", _UserText(name, f"input_layouts[{name}]"))
        given = self._by_end(given, "input")
        for name, layout in _by_name(given, list(nodes), self.mesh, "input_layouts"):
            self._add_layout(Place(nodes[name]), layout, f"input {name}", _UserText(name, f"input_layouts[{name}]"))

    def read_outputs(self, given: Any) -> None:
        for name, place, layout, source in self.wanted_outputs(given):
            self._add_layout(place, layout, f"output {name}", _UserText(name, f"{source}[{name}]"))

    def wanted_outputs(self, given: Any) -> Iterator[tuple[str, Place, Any, str]]:
        """(name, place, layout, who says so) of the outputs whose layouts the user or the model names."""
        ends = {o.name: i for i, o in enumerate(self.graph.outputs) if o.kind == "output"}
        returned = operands(self.graph.module.graph.output_node())
        given = self._by_end(given, "output")
        wanted = [(name, layout, "output_layouts") for name, layout in _by_name(given, list(ends), self.mesh, "output_layouts")]
        own = [(name, form.placements, "returned by the model") for name, form in self.graph.forms.items() if form.placements is not None]
        for name, layout, source in (*wanted, *own):
            yield name, Place(returned[ends[name]].name, 0, ends[name]), layout, source

    def read_words(self, parallel: Parallel) -> None:
        """Adds what one-word plans say where nothing else is said of the same tensor and axis."""
        warn_of_unmatched(self.graph, parallel, self.mesh)
        before, known, overruled = (dict(self.values), dict(self.results)), set(), []
        for one in axis_conditions(self.graph, parallel):
            axis = self.mesh.axis(one.axis)
            for place in self._places(one):
                key = one.node if place.result is None else place.result
                if (key, axis) in known:  # several modules return it: the innermost, which came first, counts
                    continue
                known.add((key, axis))
                said = before[0].get(place.node, ()) if place.result is None else before[1].get(place.result, ())
                if not any(c.pattern[axis] is not None and not c.forbidden for c in said):
                    self._add_word(one, place)
                elif place.result is None and self._is_overruled(one, place):
                    overruled.append(one)
        warn_of_overruled(self.graph, overruled, self.held, self.mesh)

    def _is_overruled(self, one: AxisCondition, place: Place) -> bool:
        """Whether a DTensor has another layout than the word says."""
        wanted = pattern({one.axis: one.placement}, self.mesh, self._dims(place), one.node)
        if place.node not in self.held or (_lacks_parts(wanted) and not self._parts(place)):
            return False
        wanted = self._with_parts(place, wanted, one.node)
        return not Condition(wanted, one.text, 0, one.forbidden, one.beside).admits(self.held[place.node])

    def _places(self, one: AxisCondition) -> list[Place]:
        if not one.returned:
            return [Place(one.node)]
        returned = operands(self.graph.module.graph.output_node())
        ends = zip(self.graph.outputs, returned, strict=True)
        return [Place(one.node, 0, i) for i, (end, node) in enumerate(ends) if end.kind == "output" and node.name == one.node]

    def _add_word(self, one: AxisCondition, place: Place) -> None:
        if self.mesh.shape[self.mesh.axis(one.axis)] == 1:
            return
        found = pattern({one.axis: one.placement}, self.mesh, self._dims(place), one.node)
        if _lacks_parts(found) and not self._parts(place):
            log.warning("%s: the model does not take %s apart; the solver chooses its layout", one.text, self.names.spelled(place))
            return
        found = self._with_parts(place, found, one.node)
        self.add(place, Condition(found, f"{one.text} for {self.names.spelled(place)}", 0, one.forbidden, one.beside, one.optional))

    def _by_end(self, given: Any, kind: str) -> Any:
        named = isinstance(given, Mapping) and not set(given) <= set(self.mesh.axis_names) and all(isinstance(name, str) for name in given)
        return by_end(given, self.graph, kind) if named else given

    def read(self, constraint: Constraint) -> None:
        if isinstance(constraint, Communication):
            try:
                self.mesh.axis(constraint.axis)
            except LayoutError as error:
                raise LayoutError(error.what, where=str(constraint), remedy=error.remedy) from error
            self.communication.append(constraint)
        elif isinstance(constraint, Equal):
            self._read_equal(constraint)
        elif isinstance(constraint, Forbid):
            self._read_forbidden(constraint)
        else:
            self.read_pin(_UserText(constraint.name, str(constraint), whole=True), constraint.layout)

    def read_pin(self, user_text: _UserText, layout: Any) -> None:
        several = _layouts_of_results(layout)
        for named in self.names.find(user_text.name, "" if user_text.whole else "pin ", user_text.text, several is not None):
            if len(named.places) == 1:
                whole = several[0] if several is not None and len(several) == 1 else layout
                self._add_layout(_existing_place(named, 0, whole, user_text), whole, f"{user_text.name!r} ({named.what})", user_text)
                continue
            if several is None or len(several) != len(named.places):
                raise _wrong_count(named, several, self.mesh, user_text)
            for index, wanted in enumerate(several):
                if wanted is not None:
                    self._add_layout(_existing_place(named, index, wanted, user_text), wanted, named.part(index), user_text, f"[{index}]")

    def _add_layout(self, place: Place, layout: Any, what: str, user_text: _UserText, part: str = "") -> None:
        """Adds a condition; a LayoutError quotes the user's text."""
        try:
            found = self._with_parts(place, pattern(layout, self.mesh, self._dims(place), what), what)
        except LayoutError as error:
            where = user_text.of(layout) if isinstance(layout, Held) else user_text.text + part
            raise LayoutError(error.what, where=error.where or where, remedy=error.remedy) from error
        self.add(place, Condition(found, user_text.of(layout, part), place.output))
        if isinstance(layout, Held) and layout.movable:
            self.held[place.node] = Layout(placement or Replicate() for placement in found)

    def _parts(self, place: Place) -> Mapping[int, tuple[int, ...]]:
        """The parts into which the model takes the dims of a value that may be packed."""
        value, index = producer(self.graph.by_name[place.node])
        return packings_of(self.graph).get((value.name, place.output or index), {})

    def _with_parts(self, place: Place, wanted: Pattern, what: str) -> Pattern:
        """``S(d:packed)`` with the parts of the place; raises LayoutError if the model does not take the dim apart."""
        if not _lacks_parts(wanted):
            return wanted
        known = self._parts(place)
        missing = next((p.dim for p in wanted if isinstance(p, PackedShard) and not p.parts and p.dim not in known), None)
        if missing is not None:
            remedy = f"write S({missing}), or S({missing}:a+b) with sizes of parts that the model takes it apart into"
            raise LayoutError(f"{what} cannot be S({missing}:packed): the model does not take its dim {missing} apart", remedy=remedy)
        return tuple(PackedShard(p.dim, known[p.dim]) if isinstance(p, PackedShard) and not p.parts else p for p in wanted)

    def _read_forbidden(self, forbid: Forbid) -> None:
        """Skips places where the layout is impossible anyway; raises LayoutError if it is impossible at all places."""
        layout = forbid.layout if forbid.axis is None else {forbid.axis: _forbidden_placement(forbid)}
        found: list[tuple[Place, Pattern]] = []
        errors: list[LayoutError] = []
        for named in self.names.find(forbid.name, "", str(forbid), several=True):
            for place in filter(None, named.places):
                try:
                    found.append((place, read_pattern(layout, self.mesh, self._dims(place), f"{forbid.name!r} ({named.what})")))
                except LayoutError as error:
                    errors.append(error)
        if errors and not found:
            raise LayoutError(errors[0].what, where=errors[0].where or str(forbid), remedy=errors[0].remedy) from errors[0]
        for place, taboo in found:
            if not says_nothing(taboo, self.mesh):
                self.add(place, Condition(on_several_ranks(taboo, self.mesh), str(forbid), place.output, forbidden=True))

    def _read_equal(self, equal: Equal) -> None:
        places: dict[Place, None] = {}
        for name in equal.names:
            for named in self.names.find(name, "", str(equal)):
                if any(place is not None and place.readers for place in named.places):
                    what = f"{named.what} has no layout of its own: it stands for values that others read too"
                    raise ConstraintError(what, where=str(equal), remedy="pin them, or name the values that the modules return")
                if len(named.places) != 1:
                    what = f"{named.what} has {named.count}"
                    raise ConstraintError(what, where=str(equal), remedy=f"name one of them: {name + '[0]'!r}")
                places[_existing_place(named, 0, "a name", _UserText(name, str(equal), whole=True))] = None
        if len(places) < 2:
            remedy = "name at least two, or give a glob that matches several"
            raise ConstraintError(f"only {', '.join(p.node for p in places)} is named to be equal", where=str(equal), remedy=remedy)
        self._check_alike(list(places), equal)
        self.equal.append(Equality(tuple(places), str(equal)))

    def _check_alike(self, places: Sequence[Place], equal: Equal) -> None:
        """Tensors with different numbers of dims cannot have equal layouts: a weight's dim 1 has no counterpart in its bias."""
        dims: dict[int, list[str]] = {}
        for place in places:
            dims.setdefault(self._dims(place), []).append(self.names.spelled(place))
        if len(dims) > 1:
            found = " and ".join(f"{some(names, 2)} ({count_text(count, 'dim')})" for count, names in sorted(dims.items(), reverse=True))
            remedy = "use one Equal for each number of dims, and pin the layouts that the tensors must have in common"
            raise ConstraintError(f"{found} cannot have one layout: their dims do not correspond", where=str(equal), remedy=remedy)

    def shown_of_outputs(self, given: Any) -> dict[str, Pattern]:
        """As ``shown_placements``."""
        found: dict[str, Pattern] = {}
        for name, place, layout, _ in self.wanted_outputs(given):
            said = read_pattern(layout, self.mesh, self._dims(place), f"output {name}")
            found[name] = tuple(p if ranks == 1 else None for p, ranks in zip(said, self.mesh.shape, strict=True))
        return found

    def _dims(self, place: Place) -> int:
        value = place.value(self.graph)
        assert value is not None
        return value.dim()


def _existing_place(named: Named, index: int, wanted: Any, user_text: _UserText) -> Place:
    """The requested result; raises LayoutError if it is not a tensor."""
    place = named.places[index]
    if place is None:
        what = f"{named.part(index)} is not a tensor, or nothing reads it"
        raise LayoutError(what, where=user_text.text, remedy=f"give None in place of {wanted!r}")
    return place


def _wrong_count(named: Named, given: Sequence[Any] | None, mesh: Mesh, user_text: _UserText) -> LayoutError:
    gives = count_text(1 if given is None else len(given), "layout")
    what = f"{named.what} has {named.count}, {user_text.text} gives {gives}"
    example = ", ".join([repr("R" * mesh.ndim), *["None"] * (len(named.places) - 1)])
    return LayoutError(what, where=user_text.text, remedy=f"give one for each, None where free: pins={{{user_text.name!r}: ({example})}}")


def _forbidden_placement(forbid: Forbid) -> Placement:
    """The forbidden placement on one axis."""
    given = forbid.layout
    if isinstance(given, str):
        given = Layout.parse(given)
    if isinstance(given, Sequence) and len(given) == 1:
        given = given[0]
    if not isinstance(given, Placement):
        what = f"{forbid.layout!r} is not a placement on axis {forbid.axis!r}"
        raise LayoutError(what, where=str(forbid), remedy="with axis= give one placement: 'S(1)', 'R' or 'P'")
    return given


def _layouts_of_results(layout: Any) -> list[Any] | None:
    """Layouts of several results: a sequence of layouts, or text as in ``inspect.nodes_table`` (``"RS(0), R"``, ``*`` where free)."""
    if isinstance(layout, str):
        parts = [part.strip() for part in layout.split(",")]
        return [None if part == "*" else part for part in parts] if len(parts) > 1 else None
    several = isinstance(layout, Sequence) and not any(isinstance(part, Placement) for part in layout)
    return list(layout) if several else None


def _lacks_parts(wanted: Pattern) -> bool:
    return any(isinstance(p, PackedShard) and not p.parts for p in wanted)


def shown_placements(graph: PlanningGraph, mesh: Mesh, output_layouts: Any) -> dict[str, Pattern]:
    """Output -> the placements that the user or the model names on axes of one rank, where plans say Replicate; None on other axes."""
    return _Reader(graph, mesh).shown_of_outputs(output_layouts) if 1 in mesh.shape else {}


def _by_name(given: Any, names: list[str], mesh: Mesh, what: str) -> list[tuple[str, Any]]:
    """(name, layout) pairs from a mapping by name, a sequence in order (None: free), or one layout (also a mapping by axis) for all."""
    if given is None:
        return []
    if isinstance(given, str) or (isinstance(given, (Sequence, Mapping)) and given and _is_layout(given, names, mesh)):
        return [(name, given) for name in names]
    known = ", ".join(names) or "no tensors"
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                user_text = f"{what} names {name!r}, which does not exist{closest(name, names)}"
                raise ConstraintError(user_text, where=what, remedy=f"name one of {known}")
        return [(name, layout) for name, layout in given.items() if layout is not None]
    if not isinstance(given, Sequence):
        raise ConstraintError(
            f"{what} is {a_kind(given)}",
            where=what,
            remedy="give one layout, a sequence of layouts, or a mapping of names to layouts",
        )
    if len(given) != len(names):
        raise ConstraintError(
            f"{what} has {count_text(len(given), 'layout')} for {count_text(len(names), 'tensor')}",
            where=what,
            remedy=f"give one for each of {known}, None where free",
        )
    return [(name, layout) for name, layout in zip(names, given, strict=True) if layout is not None]


def _is_layout(given: Sequence[Any] | Mapping[Any, Any], names: list[str], mesh: Mesh) -> bool:
    """Whether a sequence or mapping is one layout: all items are placements, or all keys are axes and not names of tensors."""
    if not isinstance(given, Mapping):
        return all(isinstance(p, Placement) for p in given)
    by_axis = set(mesh.axis_names) - set(names)
    return all(isinstance(p, Placement) for p in given.values()) or all(key in by_axis for key in given)


PLAN_PINS = "pins, which are a plan"


def _plan_pins(graph: PlanningGraph, mesh: Mesh, plan: ShardingPlan) -> dict[str, OpSpec]:
    """The OpSpecs of a (partial) plan; raises ConstraintError unless its mesh and nodes are those of this graph."""
    if plan.mesh.shape != mesh.shape or plan.mesh.axis_names != mesh.axis_names:
        raise ConstraintError(f"the plan is for mesh {plan.mesh}, not {mesh}", where=PLAN_PINS, remedy="plan for this mesh")
    if plan.graph_hash and plan.graph_hash != graph.hash:
        raise ConstraintError(
            f"the plan is for another graph (hash {plan.graph_hash[:12]}, this model has {graph.hash[:12]})",
            where=PLAN_PINS,
            remedy="plan again without it, or pin layouts by name",
        )
    specs = {}
    seconds = {again(name) for nodes in plan.recomputed.values() for name in nodes}  # a second run always has the spec of the first
    for node in plan.nodes:
        if node.name in seconds:
            continue
        if node.name not in graph.by_name:
            what = f"the plan names node {node.name!r}, which this graph lacks{closest(node.name, graph.by_name)}"
            raise ConstraintError(what, where=PLAN_PINS, remedy=f"name one of {some(n.name for n in planned_nodes(graph))}")
        target = graph.by_name[node.name]
        if is_getitem(target):
            remedy = f"name {target.args[0]} instead"
            raise ConstraintError(f"the plan names {node.name!r}, one output of an operator", where=PLAN_PINS, remedy=remedy)
        _check_spec(target, node.spec, mesh)
        specs[node.name] = node.spec.canonical(mesh.shape)
    return specs


def _returned_whole(graph: PlanningGraph, specs: Mapping[str, OpSpec]) -> frozenset[str]:
    """The inputs that the plan shards, while their gradients or new values are whole."""
    if "output" not in specs:
        return frozenset()
    sharded = {i.name for i in graph.inputs_of("input") if i.node in specs and not specs[i.node].outputs[0].is_replicated}
    returned = zip(graph.outputs, specs["output"].inputs, strict=True)
    return frozenset(end.name for end, layout in returned if end.kind != "output" and end.name in sharded and layout.is_replicated)


def _follow_inputs(graph: PlanningGraph, specs: Mapping[str, OpSpec], whole: frozenset[str]) -> Iterator[tuple[str, Condition]]:
    """If the plan fixes the layout of a returned gradient or mutated buffer, its input must have that layout."""
    if "output" in specs:
        nodes = {i.name: i.node for i in graph.inputs if i.kind in ("parameter", "buffer", "input")}
        for end, layout in zip(graph.outputs, specs["output"].inputs, strict=True):
            if end.kind != "output" and end.name not in whole:
                yield nodes[end.name], Condition(layout, f"{end.kind} {end.name}: {layout} of the plan given as pins")


def _check_spec(node: fx.Node, spec: OpSpec, mesh: Mesh) -> None:
    reads, gives = operands(node), outputs_of(node) if node.op != "output" else ()
    if len(spec.inputs) not in (0, len(reads)) or (node.op == "output" and not spec.inputs) or len(spec.outputs) != len(gives):
        has = f"{count_text(len(reads), 'operand')} and {count_text(len(gives), 'output')}"
        raise ConstraintError(
            f"the plan gives {node.name} the spec {spec}, but it has {has}",
            where=source_line(node) or PLAN_PINS,
            remedy="give a layout for each operand and output; a spec without inputs leaves them free",
        )
    tensors = [(o.meta["val"], layout) for o, layout in zip(reads, spec.inputs, strict=bool(spec.inputs))]
    tensors += [(v, layout) for v, layout in zip(gives, spec.outputs, strict=True) if v is not None]
    for value, layout in tensors:
        try:
            pattern(layout, mesh, value.dim(), f"{node.name} in the plan")
        except LayoutError as error:
            raise LayoutError(error.what, where=source_line(node) or PLAN_PINS, remedy=error.remedy) from error
