"""formulate: turns an annotated graph and its constraints into a PlacementProblem, which is numbers only.

Variables: one per node (its OpSpec) and one per returned output (its layout).
- node cost: compute time of the spec (``cost.compute_time``)
- transfer from a producer to all readers of a value: price of the cheapest redistribution (``redistribution.PathTable``), paid once per
  distinct layout that is read, less the part hidden beside compute (``overlap``). With several sizes, both are means (``prices``).
- parts of one operator (``groups``): one variable for all, which also pays for the reductions between them.
- a gradient is returned in its parameter's layout, a mutated buffer in the buffer's, those of plain inputs whole (``returned_whole``); a
  tangent has the layout of its output.
- equalities: an edge from each tensor to the first; limits on communication: a row each (``communication_limits``).
- a memory limit: the bytes of values and of their redistributed copies over their lifetimes (``memory_use``). A node's state then also
  says whether it is recomputed (``modes``), and one variable per block makes its nodes agree.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from torch import fx

from fxshard.cost import bucketing_saving, time_price
from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import PlanningGraph, operands, planned_nodes, producer
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price, bytes_price, path_price, path_table_for
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, cuts_one_element, input_layouts
from fxshard.passes.annotation.groups import Group, groups, internal_redistributions, joint_specs
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.annotation.lifetimes import Span
from fxshard.passes.annotation.overlap import Overlap
from fxshard.passes.annotation.recompute import Block
from fxshard.passes.memory.memory_lower_bound import MemoryLowerBound
from fxshard.passes.memory.memory_use import Kept, MemoryUse, Reader, Redistributed
from fxshard.passes.memory.offload import DEVICE, HostCopies
from fxshard.passes.memory.saved_for_backward import KEPT, RECOMPUTED, Crossing, Layouts, Modes, in_modes, recompute_costs
from fxshard.passes.memory.staging import Staging
from fxshard.passes.planning.admissible_specs import admissible_specs, pins_of, plan_pin_text, satisfying, user_location
from fxshard.passes.planning.communication_limits import SentTensor, limit_rows, own_bytes
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.planning.names import Place
from fxshard.passes.planning.patterns import Condition
from fxshard.passes.trace.fakes.mixed_precision import reduces_pending
from fxshard.plans.offload import PARAMETERS
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.plan_data import again as second_run
from fxshard.solver import Live, PlacementProblem, Row, Transfer


def formulate(annotated: Annotated, constraints: Constraints, objective: str = "time") -> Formulation:
    """Builds the problem; raises ConstraintError when a pin leaves a node no spec."""
    price = time_price(annotated.mesh) if objective == "time" else bytes_price
    return _Builder(annotated.at_memory_sizes, constraints, price, objective).build()


@dataclass
class _Builder:
    annotated: Annotated
    constraints: Constraints
    price: Price
    objective: str
    costs: list[np.ndarray] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_costs: list[np.ndarray] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    cache: IdentityCache = field(default_factory=IdentityCache)
    redistributed: list[Redistributed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    group_vars: list[tuple[int, Group]] = field(default_factory=list)
    """(variable, the group that it decides on)."""
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Variable -> the mode of each of its states, for variables with several modes."""
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """As in ``Formulation``."""
    staged: tuple[Live, ...] = ()
    """The copies of the optimiser's step."""
    blocks: dict[int, Block] = field(default_factory=dict)
    block_vars: dict[str, int] = field(default_factory=dict)
    """Block -> the variable that says whether it is recomputed."""

    @property
    def graph(self) -> PlanningGraph:
        return self.annotated.graph

    @property
    def mesh(self) -> Mesh:
        return self.annotated.mesh

    def build(self) -> Formulation:
        self.node_vars: dict[str, tuple[int, tuple[OpSpec, ...]]] = {}
        self.result_vars: dict[int, tuple[int, tuple[Layout, ...]]] = {}
        joint = [g for g in groups(self.graph, self._unconstrained) if self._joint(g)[0]]
        together = {n: g for g in joint for n in g.nodes}
        limit, redone = self.constraints.memory_limit, self.constraints.recomputed
        unlimited = limit is None and not redone and PARAMETERS not in (self.constraints.offload.fixed or {}).values()
        self.modes = None if unlimited else Modes(self.graph, [g.nodes for g in joint])
        unknown = redone - {block.name for block in self.modes.blocks} if self.modes else redone
        if unknown:
            what = f"the plan computes {', '.join(sorted(unknown))} again, which this model cannot"
            raise ConstraintError(what, where="pins, which are a plan", remedy="plan again without these pins")
        for node in planned_nodes(self.graph):
            if node in together and node.name not in self.node_vars:
                self._group(together[node])
            elif node.op != "output" and node.name not in self.node_vars:
                self._node(node)
        self._results()
        self._start_tangents()
        self._start_equal()
        readers = self._readers()
        for name, found in readers.items():
            self._transfers_of_value(self.graph.by_name[name], found)
        self._tangents()
        self._equalities()
        self._stage_states()
        lives = () if self.modes is None or limit is None else self._lives(self.modes)
        problem = PlacementProblem(
            tuple(self.costs),
            tuple(self.edges),
            tuple(self.edge_costs),
            usage_limit=limit,
            node_names=tuple(self.names),
            transfers=tuple(self.transfers),
            lives=lives,
            rows=self._communication_rows(),
        )
        unit = "microseconds" if self.objective == "time" else "bytes"
        named = self.node_vars, self.result_vars, readers
        relaxed = None if self.modes is None or limit is None else self._relaxed(problem, readers, self.modes)
        made = Formulation(problem, *named, self.price, unit, tuple(self.start), self.blocks, tuple(self.kept), self._times(), relaxed)
        return replace(made, places=self.places)

    def _times(self) -> dict[str, int]:
        if self.modes is None:
            return {}
        times = self.modes.times
        return {n.name: t for n, t in times.time.items()} | {second_run(n.name): t for n, t in times.recomputed_at.items()}

    def _usage(self, modes: Modes) -> MemoryUse:
        priced = self.price, self.annotated.prices
        return MemoryUse(modes, self.mesh, self.constraints.optimizer, self.cache, self.node_vars, self.states, *priced, self.places)

    def _relaxed(self, problem: PlacementProblem, readers: Mapping[str, tuple[Reader, ...]], modes: Modes) -> PlacementProblem:
        """The problem that counts only the memory that every plan certainly needs."""
        kept = {one.crossing.value.name: one for one in self.kept}
        bound = MemoryLowerBound(self._usage(modes), readers, kept, list(self.transfers))
        lives = (*bound.lives(), *self.staged)
        return replace(problem, lives=lives, transfers=tuple(bound.transfers))

    def _lives(self, modes: Modes) -> tuple[Live, ...]:
        """Memory as `Live`s: how many bytes, and when."""
        usage, copies = self._usage(modes), self.redistributed
        lasting = (*usage.as_produced(copies), *usage.redistributed(copies), *usage.within_groups(self.group_vars), *usage.kept(self.kept))
        return (*lasting, *usage.workspaces(copies), *self.staged)

    def _communication_rows(self) -> tuple[Row, ...]:
        """A row per limit on communication: the bytes of transfers, and of the redistributions inside a group."""
        limits = self.constraints.communication
        moved = list(self._sent_tensors()) if limits else []
        own = [own_bytes(limit.axis, self.node_vars, self.annotated.prices, self._runs) for limit in limits]
        return limit_rows(limits, self.mesh, self.price, moved, own, [len(c) for c in self.costs])

    def _sent_tensors(self) -> Iterator[SentTensor]:
        for one in self.redistributed:
            layouts = tuple(dict.fromkeys(itertools.chain.from_iterable(one.ends)))
            yield SentTensor(*self.annotated.prices.extent(one.value), layouts, transfer=one.transfer)
        for var, group in self.group_vars:
            options, runs = [self.node_vars[n.name][1] for n in group.nodes], self._runs(var)
            for state, chosen in enumerate(zip(*options, strict=True)):
                for member, output, want in internal_redistributions(group, chosen):
                    have = chosen[member].outputs[output]
                    assert have is not None
                    moved = SentTensor(*self.annotated.prices.extent(group.nodes[member], output), (have, want), var=var, state=state)
                    yield from [moved] * runs[state]

    def _runs(self, var: int) -> list[int]:
        """How often the nodes of a variable run, for each of its states."""
        return [1 + (mode == RECOMPUTED) for mode in self.states.get(var, (KEPT,) * len(self.costs[var]))]

    def _variable(self, name: str, costs: np.ndarray, start: int = 0) -> int:
        self.start.append(start)
        self.costs.append(costs)
        self.names.append(name)
        return len(self.costs) - 1

    def _edge(self, i: int, j: int, costs: np.ndarray) -> None:
        self.edges.append((i, j))
        self.edge_costs.append(costs)

    def _node(self, node: fx.Node) -> None:
        specs, c = admissible_specs(node, self.annotated, self.constraints), self.constraints
        places = c.offload.places(node, self.annotated.times, c.optimizer, c.memory_limit is not None)
        if places == (DEVICE,):
            self._variable_for([node], node.name, self._compute_costs(node, specs), [specs])
            return
        repeated = self.cache(("places", len(places)), (specs,), partial(operator.mul, specs, len(places)))
        var = self._variable_for([node], node.name, self.host_copies.costs(node, specs, places), [repeated])
        self.places[var] = tuple(place for place in places for _ in specs)

    def _variable_for(self, nodes: Sequence[fx.Node], name: str, costs: np.ndarray, options: Sequence[tuple[OpSpec, ...]]) -> int:
        """Adds one variable for nodes with these ``options``, repeated for each mode that the nodes may take, KEPT first."""
        modes = (KEPT,) if self.modes is None else self.modes.of(nodes[0])
        var = self._variable(name, costs if modes == (KEPT,) else np.concatenate([costs * (2 if m == RECOMPUTED else 1) for m in modes]))
        for node, specs in zip(nodes, options, strict=True):
            self.node_vars[node.name] = var, self.cache(("modes", len(modes)), (specs,), partial(operator.mul, specs, len(modes)))
        if len(modes) > 1:
            self.states[var] = self.cache(("states", modes, len(costs)), (), lambda: tuple(m for m in modes for _ in costs))
        if RECOMPUTED in modes:
            assert self.modes is not None
            redone = np.array(self.states[var]) == RECOMPUTED
            self._edge(var, self._block_variable(self.modes.block[nodes[0]]), np.where(np.stack([redone, ~redone], axis=1), np.inf, 0.0))
        return var

    def _block_variable(self, block: Block) -> int:
        """The variable that says whether a block is recomputed."""
        if block.name not in self.block_vars:
            forced = block.name in self.constraints.recomputed
            self.block_vars[block.name] = self._variable(f"recompute {block.name}", np.array([np.inf if forced else 0.0, 0.0]))
            self.blocks[self.block_vars[block.name]] = block
        return self.block_vars[block.name]

    @cached_property
    def host_copies(self) -> HostCopies:
        unit = "microseconds" if self.objective == "time" else "bytes"
        return HostCopies(self.annotated.times, self.mesh, self.constraints.optimizer, unit)

    def _stage_states(self) -> None:
        """Adds a variable for the bytes that the optimiser's step copies to the device at once: no less than any parameter on the host."""
        if self.modes is not None and self.places:
            staging = Staging(self._usage(self.modes))
            hub = self._variable("staged for the step", np.zeros(len(staging.sizes)), len(staging.sizes) - 1)
            for var, costs in staging.costs.items():
                self._edge(var, hub, costs)
            self.staged = (Live(self.modes.times.end - 1, self.modes.times.end, staging.sizes, hub),)

    def _compute_costs(self, node: fx.Node, specs: tuple[OpSpec, ...]) -> np.ndarray:
        prices = self.annotated.prices
        if node.name not in self.annotated.calls:
            return self.cache("free", (specs,), lambda: np.zeros(len(specs)))  # repeated layers share one array
        if self.objective == "communication":
            return self.cache(("sending", prices.calls(node.name)), (specs,), lambda: prices.sending(node.name, specs))
        return self.cache(("compute", prices.calls(node.name)), (specs,), lambda: prices.computing(node.name, specs))

    def _unconstrained(self, node: fx.Node) -> bool:
        """Whether no constraint names the node."""
        named = self.constraints.specs.keys() | self.constraints.reads.keys()
        return not pins_of(node, self.constraints) and node.name not in named

    def _group(self, group: Group) -> None:
        """One variable for all nodes of a group; costs are their compute and the redistributions between them."""
        _, costs, options = self._joint(group)
        self.group_vars.append((self._variable_for(group.nodes, group.nodes[-1].name, costs, options), group))

    def _joint(self, group: Group) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, tuple[tuple[OpSpec, ...], ...]]:
        """The joint states of a group: spec indices as from ``joint_specs``, the cost of each state, and the specs of each node."""
        specs = [self.annotated.specs[n.name] for n in group.nodes]
        key = "group", group.sources, tuple(self.annotated.prices.calls(n.name) for n in group.nodes)
        return self.cache(key, specs, lambda: self._joint_costs(group, joint_specs(group, self.annotated.specs)))

    def _joint_costs(
        self, group: Group, joint: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, tuple[tuple[OpSpec, ...], ...]]:
        specs = self.annotated.specs
        states = np.array(joint, dtype=np.int64).reshape(len(joint), len(group.nodes))
        costs = np.zeros(len(states))
        for column, node in zip(states.T, group.nodes, strict=True):
            costs += self._compute_costs(node, specs[node.name])[column]
        for state, row in enumerate(states):
            chosen = [specs[node.name][k] for node, k in zip(group.nodes, row, strict=True)]
            for member, output, want in internal_redistributions(group, chosen):
                have = chosen[member].outputs[output]
                assert have is not None
                costs[state] += path_price(have, want, *self.annotated.prices.extent(group.nodes[member], output), self.mesh, self.price)
        return joint, costs, tuple(tuple(specs[n.name][k] for k in column) for column, n in zip(states.T, group.nodes, strict=True))

    def _results(self) -> None:
        """One variable per returned output: replicated, sharded, or as pinned."""
        returned = operands(self.graph.module.graph.output_node())
        whole = self.constraints.specs.get("output")
        for index, (end, node) in enumerate(zip(self.graph.outputs, returned, strict=True)):
            if end.kind != "output":
                if end.name in self.constraints.returned_whole:
                    self.result_vars[index] = (self._variable(f"{end.kind} {end.name}", np.zeros(1)), (Layout.replicated(self.mesh.ndim),))
                continue
            layouts = self._returnable(node)
            requirements = [(pin.user_text, pin.admits) for pin in self.constraints.results.get(index, ())]
            if whole is not None:
                user_text = plan_pin_text(f"output {end.name}", whole.inputs[index])
                requirements.append((user_text, Condition(whole.inputs[index], user_text).admits))
            for user_text, holds in requirements:
                if not any(map(holds, layouts)):
                    remedy = "outputs can be replicated or sharded, not partial"
                    raise ConstraintError(f"{user_text} cannot hold for {end.name}", where=user_location(node, self.graph), remedy=remedy)
            kept = satisfying(layouts, requirements, user_location(node, self.graph))
            kept = tuple(layout for layout in kept if not cuts_one_element(layout, node, batch=True)) or kept
            self.result_vars[index] = (self._variable(end.name, np.zeros(len(kept))), kept)

    def _returnable(self, node: fx.Node) -> list[Layout]:
        """Layouts in which an output may be returned at all sizes that are priced."""
        others = [result_layouts(one.graph.by_name[node.name], self.mesh) for _, one in self.annotated.samples]
        return [layout for layout in result_layouts(node, self.mesh) if all(layout in other for other in others)]

    def _readers(self) -> dict[str, tuple[Reader, ...]]:
        found: dict[str, list[Reader]] = {}
        for node in planned_nodes(self.graph):
            if node.op == "output":
                for index, operand in enumerate(operands(node)):
                    found.setdefault(operand.name, []).append(self._returned(index))
            elif node.op == "call_function":
                var, specs = self.node_vars[node.name]
                for k, operand in enumerate(operands(node)):
                    found.setdefault(operand.name, []).append(Reader(var, self._layouts(specs, "inputs", k), node.name, k))
        return {name: tuple(readers) for name, readers in found.items()}

    def _returned(self, index: int) -> Reader:
        """A result is read in its own variable's layout if it has one, else, as a gradient or mutated buffer, in that of its input."""
        if index in self.result_vars:
            return Reader(*self.result_vars[index], "output", index)
        end = self.graph.outputs[index]
        kinds = ("parameter", "buffer", "input")
        node = next(i.node for i in self.graph.inputs if i.name == end.name and i.kind in kinds)
        var, specs = self.node_vars[node]
        return Reader(var, self._layouts(specs, "outputs", 0), "output", index)

    def _layouts(self, specs: tuple[OpSpec, ...], ends: str, index: int) -> tuple[Layout, ...]:
        """The layouts of one operand or result under each spec; ``ends`` is ``inputs`` or ``outputs``."""
        return self.cache(("layouts", ends, index), (specs,), lambda: tuple(getattr(s, ends)[index] for s in specs))

    def _transfers_of_value(self, node: fx.Node, readers: tuple[Reader, ...]) -> None:
        """Adds the transfers of a value from its producer's layout to its readers'."""
        source, index = producer(node)
        var, specs = self.node_vars[source.name]
        have = self._layouts(specs, "outputs", index)
        if self.modes is None:
            self._transfer(node, var, have, [(r.var, r.layouts) for r in readers], _places(readers), (0, 0))
            return
        crossing, redone = self.modes.crossing(node), {n.name for n in self.modes.recomputed_readers(node)}
        again = [(r.var, in_modes(self.cache, r.layouts, self.states.get(r.var), (RECOMPUTED,))) for r in readers if r.node in redone]
        if crossing is not None:
            self._kept_variable(crossing, (var, have), readers, again)
            return
        nodes = self.modes.times.readers[node]
        self._transfer(node, var, have, [(r.var, r.layouts) for r in readers], _places(readers), self.modes.times.copy_span(node, nodes))
        if again:
            self._transfer(node, var, have, again, [], self.modes.backward_span((), self.modes.recomputed_readers(node), node))

    def _kept_variable(
        self, crossing: Crossing, made: tuple[int, tuple[Layout, ...]], readers: Sequence[Reader], again: Sequence[tuple[int, Layouts]]
    ) -> None:
        """Adds a variable for the layout in which a value is saved for the backward; the backward reads that layout.

        A recomputed value is found in the layout in which it is produced. A state for "not saved" exists if only recomputed nodes would
        read the value, and is taken when none of them is recomputed.
        """
        (var, have), value = made, crossing.value
        names = {n.name for n in crossing.early}
        halves = [[r for r in readers if (r.node in names) is half] for half in (True, False)]
        early, late = ([(r.var, r.layouts) for r in half] for half in halves)
        keys = [have, *(layouts for _, layouts in (*early, *late))]
        layouts = self.cache("kept", keys, lambda: tuple(dict.fromkeys(itertools.chain.from_iterable(keys))))
        inside, none = self.modes is not None and producer(value)[0] in self.modes.block, not late
        redone = tuple(dict.fromkeys(have)) if inside else ()
        kept = self.cache(("kept", inside, none), keys, lambda: (*layouts, *(None for _ in range(none)), *(None for _ in redone)))
        read = self.cache(("read", inside, none), keys, lambda: (*layouts, *(None for _ in range(none)), *redone))
        to = self._variable(f"kept {value.name}", np.zeros(len(kept)), len(layouts) if none else layouts.index(have[self.start[var]]))
        self._transfer(value, var, have, [*early, (to, kept)], _places(halves[0]), crossing.first)
        self._transfer(value, to, read, [*late, *again], _places(halves[1]), crossing.second)
        if var in self.places:
            several = len({self.modes.block[n].name for n in crossing.redone}) > 1 if self.modes is not None else False
            self._edge(var, to, self.host_copies.kept_costs(value, have, self.places[var], kept, none, several))
        if inside:
            agree = partial(recompute_costs, have, read, self.states[var], len(kept) - len(redone))
            self._edge(var, to, self.cache("agree in mode", (have, read, self.states[var]), agree))
        if none:
            assert self.modes is not None
            blocks = list(dict.fromkeys(self.modes.block[n].name for n in crossing.redone))
            gone = np.arange(len(kept)) == len(layouts)
            idle = ~gone & (len(blocks) == 1)  # saved but unread: with several blocks, allowed only in the producer's layout, which is free
            if len(blocks) > 1:
                other = np.array([[at is not None and at != made for at in kept] for made in have])
                self._edge(var, to, np.where(other, np.inf, 0.0))
            for block in blocks:
                self._edge(to, self.block_vars[block], np.where(np.stack([idle, gone], axis=1), np.inf, 0.0))
        self._record_kept(crossing, to, (kept, read), (var, have))

    def _record_kept(self, crossing: Crossing, to: int, layouts: tuple[Layouts, Layouts], made: tuple[int, tuple[Layout, ...]]) -> None:
        """Records the saved value. If the original stays alive anyway, a free transfer stands for the memory of a saved copy."""
        kept, read = layouts
        transfer, ends = -1, (made[1], kept)
        if not crossing.own and self.constraints.memory_limit is not None:
            transfer = len(self.transfers)
            prices, (given, wanted) = self.cache(
                ("prices", *self.annotated.prices.extent(crossing.value), None, crossing.value.name in self.graph.unreduced),
                ends,
                lambda: self._priced(crossing.value, ends, None),
            )
            self.transfers.append(Transfer(made[0], given, ((to, wanted),), np.zeros_like(prices)))
        self.kept.append(Kept(crossing, to, kept, read, transfer, ends))

    def _transfer(
        self, node: fx.Node, var: int, have: Layouts, wants: Sequence[tuple[int, Layouts]], places: Sequence[tuple[str, int]], span: Span
    ) -> None:
        """``wants``: (variable, layouts) of the readers; ``places``: the reads beside which the communication may be hidden."""
        others = [(reader, want) for reader, want in wants if reader != var]  # a returned input reads itself: no transfer
        if not others:
            return
        ends = [have, *(want for _, want in others)]
        beside = self.annotated.prices.overlap(node.name, places) if self.objective == "time" else None
        priced = partial(self._priced, node, ends, beside)
        key = ("prices", *self.annotated.prices.extent(node), beside, node.name in self.graph.unreduced)
        prices, (source_numbers, *numbers) = self.cache(key, ends, priced)
        distinct = {(reader, want.tobytes()): (reader, want) for (reader, _), want in zip(others, numbers, strict=True)}
        self.redistributed.append(Redistributed(node, len(self.transfers), tuple(ends), span))
        self.transfers.append(Transfer(var, source_numbers, tuple(distinct.values()), prices))

    def _priced(self, node: fx.Node, ends: Sequence[Layouts], beside: Overlap | None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Prices between all layouts of a value, less the hidden part, and the row or column numbers of the layouts at each end.

        None stands for no value or no reader and costs nothing.
        """
        layouts = tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))
        number = {layout: k for k, layout in enumerate(layouts)}
        there = [layout for layout in layouts if layout is not None]
        some = np.ix_(*[[number[layout] for layout in there]] * 2)
        paths = path_table_for(there, *self.annotated.prices.extent(node), self.mesh, self.price)
        prices = np.zeros((len(layouts), len(layouts)))
        joins = beside is not None and beside.joins
        prices[some] = paths.between(paths.bucketed(bucketing_saving(self.mesh)) if joins else paths.prices, there)
        if beside is not None:
            prices[some] -= paths.between(beside.hidden(paths.communication), there)
        if node.name in self.graph.unreduced:
            prices[some] = np.where(reduces_pending(there), np.inf, prices[some])
        return prices, [np.array([number[layout] for layout in end]) for end in ends]

    def _tangents(self) -> None:
        """A tangent has the layout of its output."""
        for result, layouts, var, specs in self._tangent_pairs():
            self._edge(result, var, _equality_costs(layouts, tuple(s.outputs[0] for s in specs)))

    def _start_tangents(self) -> None:
        """Makes the start give each tangent the layout of its output where the pins allow it."""
        for result, layouts, var, specs in self._tangent_pairs():
            both = [(a, b) for a, layout in enumerate(layouts) for b, s in enumerate(specs) if s.outputs[0] == layout]
            if both:
                self.start[result], self.start[var] = both[0]

    def _tangent_pairs(self) -> list[tuple[int, tuple[Layout, ...], int, tuple[OpSpec, ...]]]:
        by_name = {o.tangent: i for i, o in enumerate(self.graph.outputs)}
        return [(*self.result_vars[by_name[end.name]], *self.node_vars[end.node]) for end in self.graph.inputs_of("tangent")]

    def _equalities(self) -> None:
        """Tensors declared equal have the layout of the first of them."""
        for equality in self.constraints.equal:
            (first, layouts), *others = map(self._at, equality.places)
            for var, its in others:
                self._edge(first, var, _equality_costs(layouts, its))

    def _start_equal(self) -> None:
        """Makes the start give tensors declared equal the first layout that all of them allow."""
        for equality in self.constraints.equal:
            ends = [self._at(place) for place in equality.places]
            common = next((layout for layout in ends[0][1] if all(layout in layouts for _, layouts in ends)), None)
            if common is not None:
                for var, layouts in ends:
                    self.start[var] = layouts.index(common)

    def _at(self, place: Place) -> tuple[int, Layouts]:
        """(variable, the layout of a place in each of its states)."""
        if place.result in self.result_vars:
            return self.result_vars[place.result]
        source, index = producer(self.graph.by_name[place.node])
        var, specs = self.node_vars[source.name]
        output = index if source.name != place.node else place.output
        return var, tuple(s.outputs[output] for s in specs)


def _places(readers: Sequence[Reader]) -> list[tuple[str, int]]:
    return [(r.node, r.operand) for r in readers]


def _equality_costs(left: Sequence[Layout | None], right: Sequence[Layout | None]) -> np.ndarray:
    """0 where two layouts are equal, inf elsewhere."""
    return np.array([[0.0 if a == b else np.inf for b in right] for a in left])


def result_layouts(node: fx.Node, mesh: Mesh) -> list[Layout]:
    """Layouts in which an output may be returned."""
    return input_layouts(node, mesh)
