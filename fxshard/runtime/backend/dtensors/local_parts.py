"""The parts of a Dynamo graph that compute on local tensors, between ``to_local`` and ``from_local``, as regions of a planning graph.

A plain value is *whole*, equal on all ranks, unless a chain of operators on plain tensors connects it with a call whose layout is not
replicated: the result of a ``to_local``, or the argument of a ``from_local``. Then it is *local*: it is what this rank holds, and so is
all that is connected with it. Whole values are planned like all others; local ones are computed where they are.

The planning graph has global values only. A local tensor among the inputs or outputs of the graph is there a row of its *stack*: a tensor
with one more dim, of one row for each rank, sharded by rows over all axes. So it has one meaning for all ranks, and gradients of its own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import HigherOrderOperator, pytree
from fxshard._torch_compat.dtensor.captured import captured_mesh
from fxshard._torch_compat.dtensor.packed import without_strides
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import PlanError, TraceError
from fxshard.graph.planning_graph import reached, source_line
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.passes.trace.fakes.fake_model import fake_tensor
from fxshard.passes.trace.returned import RETURNED
from fxshard.passes.trace.rewrites.shared_memory import missed_writes
from fxshard.runtime.backend.graph_calls import LOCAL, DTensorCall, dtensor_calls_in, of_gradient
from fxshard.runtime.backend.nested_calls import inline_checkpoints
from fxshard.runtime.calls.inputs import as_dtensor

Parts = Sequence[Sequence[int]]
TO_LOCAL = ("to_local", "full_tensor", LOCAL)
SUM = Partial()
PENDING = (SUM, Partial("avg"), Partial("max"), Partial("min"))
"""The pending reductions of which results can be returned by terms."""
KEPT_META = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class LocalEnds:
    """Where local tensors enter and leave a graph. ``inputs``: placeholders, by index. ``shards``, ``rows``: outputs, by index, of which
    the caller gets the shard of a DTensor, or the row of a stack; ``terms``: the layouts of those rows that are this rank's terms of a
    pending reduction, from which the caller gets a DTensor. ``device_mesh``: that of the graph's calls, None without calls."""

    inputs: frozenset[int] = frozenset()
    shards: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    terms: Mapping[int, Layout] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None

    def check_mesh(self, mesh: Any) -> None:
        """Raises PlanError if the graph's calls are for another mesh than ``mesh``, on which it is planned."""
        if self.device_mesh is not None and self.device_mesh != mesh:
            what = f"the graph calls DTensor's functions for {self.device_mesh}, and the backend's mesh is {mesh}"
            raise PlanError(what, remedy="leave the option mesh out to plan for the DTensors' mesh, or make them on all axes of the mesh")

    def with_stacks(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a call, with the stacks of those that are local."""
        mesh = self.device_mesh
        return tuple(stacked(x, mesh) if mesh is not None and i in self.inputs else x for i, x in enumerate(args))


NO_ENDS = LocalEnds()


def row_layout(ndim: int) -> Layout:
    """The layout of a stack on a mesh of ``ndim`` axes."""
    return Layout([Shard(0)] * ndim)


def stacked(value: Tensor, device_mesh: DeviceMesh) -> DTensor:
    """The stack of which ``value``, or what this rank holds of it, is this rank's row, in the same memory; differentiable."""
    row = value.to_local() if isinstance(value, DTensor) else value
    return as_dtensor(row.unsqueeze(0), device_mesh, row_layout(device_mesh.ndim), (device_mesh.size(), *row.shape))


def dtensor_of_terms(row: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """The DTensor in ``layout``, with a pending sum, of which ``row`` is this rank's term; differentiable."""
    shape = list(row.shape)
    for dim, count in parts_of(layout, mesh):
        shape[dim] *= count
    return as_dtensor(row, mesh, layout, shape)


def parts_of(layout: Layout, mesh: DeviceMesh) -> Parts:
    """(dim, number of shards) of each placement that shards."""
    return tuple((p.dim, n) for p, n in zip(layout, mesh.shape, strict=True) if isinstance(p, Shard))


def replace_dtensor_calls(graph: fx.Graph, terms: bool = True) -> LocalEnds:
    """Replaces DTensor's calls in a graph with Dynamo's example values by fxshard's operators on global values, and returns its ends.

    ``terms``: whether results that are pending sums in eager execution are returned as such.

    ``redistribute`` and the calls on whole values become ``fxshard.placed``, those on local ones the ends of a region. Raises TraceError,
    with the user's line, for what cannot be planned, PlanError for two meshes.
    """
    inline_checkpoints(graph)
    calls, sums = dtensor_calls_in(graph), pending_inputs(graph)
    returned = pending_outputs(graph) if terms else {}
    meshes = [*(call.device_mesh for call in calls.values()), *(captured_mesh(n.meta["example_value"]) for n in (*sums, *returned))]
    return _Replacement(graph, calls, sums, returned, meshes[0]).run() if meshes else NO_ENDS


def pending_inputs(graph: fx.Graph) -> dict[fx.Node, Layout]:
    """The inputs that are DTensors of pending sums, which a plan's inputs cannot be: each rank's term is a local tensor."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor) and {type(p) for p in value.placements} in ({Partial}, {Partial, Replicate}):
            found[node] = Layout(value.placements)
    return found


def pending_outputs(graph: fx.Graph) -> dict[fx.Node, Layout]:
    """The computed results that are DTensors of pending sums, averages, maxima or minima, in shards of one size."""
    found = {}
    for node in pytree.tree_leaves(graph.output_node().args[0]):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) and node.op != "placeholder" else None
        if not isinstance(value, DTensor) or not all(type(p) in (Shard, Replicate) or p in PENDING for p in value.placements):
            continue
        layout = Layout(value.placements)
        sizes = [(value.shape[dim], count) for dim, count in parts_of(layout, captured_mesh(value))]
        if layout.has_partial and all(isinstance(size, int) and size % count == 0 for size, count in sizes):
            found[node] = layout
    return found


@dataclass
class _Replacement:
    """A graph while its calls are replaced. ``sums``, ``returned``: the inputs and results that are pending sums; ``local``: its local
    values."""

    graph: fx.Graph
    calls: Mapping[fx.Node, DTensorCall]
    sums: Mapping[fx.Node, Layout]
    returned: Mapping[fx.Node, Layout]
    mesh: DeviceMesh
    local: set[fx.Node] = field(default_factory=set)

    def run(self) -> LocalEnds:
        output, mesh = self.graph.output_node(), self.mesh
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.axes, self.by_row = str(as_mesh(mesh)), str(row_layout(mesh.ndim))
        handed = {call.node for call in self.calls.values() if self._only_handed_out(call, output)}
        links = _plain_links(self.graph, self.calls)
        self.local = reached(self._seeds(handed), lambda node: links.get(node, ()))
        inputs = frozenset(i for i, node in enumerate(placeholders) if node in self.local or node in self.sums)
        operators = {node for node in self.graph.nodes if node not in self.calls and _is_dtensor_operator(node)}
        leaves, spec = pytree.tree_flatten(output.args[0])
        shards = frozenset(i for i, leaf in enumerate(leaves) if leaf in handed)
        terms = {i: self.returned[leaf] for i, leaf in enumerate(leaves) if leaf in self.returned and leaf not in self.local}
        leaves = [self._term_of_output(leaf) if i in terms else leaf for i, leaf in enumerate(leaves)]
        rows = frozenset(i for i, leaf in enumerate(leaves) if leaf in self.local)
        leaves = [self._row_of_output(leaf) if i in rows else self._as_predicted(leaf) for i, leaf in enumerate(leaves)]
        output.args = (pytree.tree_unflatten(leaves, spec),)
        for node in list(self.graph.nodes):
            if node in self.calls:
                self._replace(self.calls[node], node in handed)
            elif node in operators:
                self._replicate_operands(node)
        for i in inputs:
            self._read_row(placeholders[i], placeholders[-1])
        return LocalEnds(inputs, shards, rows, terms, mesh)

    def _only_handed_out(self, call: DTensorCall, output: fx.Node) -> bool:
        """Whether nothing but the caller reads the shard that ``call`` takes from a DTensor."""
        alone = all(user is output or user.target is RETURNED for user in call.node.users)
        plain = call.kind == "to_local" and not call.chosen and not call.layout.has_partial
        return alone and plain and not call.is_whole and output in call.node.users

    def _seeds(self, handed: set[fx.Node]) -> Iterable[fx.Node]:
        for call in self.calls.values():
            if call.kind == "from_local" and not call.is_whole:
                yield call.value
            elif call.kind in TO_LOCAL and not call.is_whole and call.node not in handed:
                yield call.node

    def _replace(self, call: DTensorCall, handed: bool) -> None:
        layout, gradient, axes = call.layouts
        value, is_local = _operand(call.node), call.value in self.local or call.node in self.local
        with _inserting(self.graph, call.node):
            if call.kind == "redistribute":
                new = self.graph.call_function(torch.ops.fxshard.placed.default, (value, layout, axes, False))
            elif call.kind == "from_local" and is_local:
                self._check_shape(call)
                new = self.graph.call_function(value_of, (value, call.parts, layout, gradient, axes))
            elif call.kind == "from_local":
                new = self.graph.call_function(declared_value, (value, layout, axes))
            elif is_local:
                new = self.graph.call_function(shard_of, (value, call.parts, layout, gradient, axes, source_line(call.node) or ""))
                self.local.add(new)
            else:
                new = self.graph.call_function(handed_out, (value, layout, axes, "local" if handed else "whole"))
            if call.kind == LOCAL:
                new = self.graph.call_method("detach", (new,))
        call.node.replace_all_uses_with(new)
        self.graph.erase_node(call.node)

    def _check_shape(self, call: DTensorCall) -> None:
        """Raises TraceError for a ``from_local`` of shards of different sizes."""
        shape, whole = list(call.value.meta["example_value"].shape), tuple(call.node.meta["example_value"].shape)
        for dim, count in call.parts:
            shape[dim] = shape[dim] * count
        sizes = [*shape, *whole]
        if all(isinstance(n, int) for n in sizes) and tuple(shape) != whole:
            what = f"from_local makes a tensor of {whole} from shards of different sizes; shards like this rank's make {tuple(shape)}"
            raise TraceError(what, where=source_line(call.node), remedy="pad the shards to one size")

    def _row_of_output(self, node: fx.Node) -> fx.Node:
        with _inserting(self.graph, node, self.graph.output_node().prev):
            stack = self.graph.call_function(stack_of, (node, self.mesh.size(), self.by_row, self.axes))
            return self.graph.call_function(handed_out, (stack, self.by_row, self.axes, "local"))

    def _term_of_output(self, node: fx.Node) -> fx.Node:
        """This rank's term of a result that is a pending sum; the value itself for a pending average, maximum or minimum."""
        layout = Layout([p if p in (SUM, Replicate()) or isinstance(p, Shard) else Replicate() for p in self.returned[node]])
        with _inserting(self.graph, node, self.graph.output_node().prev):
            ends = parts_of(layout, self.mesh), str(layout), str(of_gradient(layout)), self.axes
            new = self.graph.call_function(shard_of, (node, *ends, source_line(node) or ""))
        self.local.add(new)
        return new

    def _as_predicted(self, leaf: Any) -> Any:
        """An output that is a DTensor, in the layout that it has in eager execution, which code that calls DTensor's API relies on."""
        value = leaf.meta.get("example_value") if isinstance(leaf, fx.Node) and leaf.op != "placeholder" else None
        placements = without_strides(value.placements) if self.calls and isinstance(value, DTensor) else []
        if not placements or any(type(p) not in (Shard, Replicate) for p in placements):
            return leaf
        with _inserting(self.graph, leaf, self.graph.output_node().prev):
            placed = torch.ops.fxshard.placed.default
            return self.graph.call_function(placed, (leaf, str(Layout(placements)), self.axes, False))

    def _read_row(self, placeholder: fx.Node, last: fx.Node) -> None:
        with _inserting(self.graph, placeholder, last):
            row = value = self.graph.call_function(row_of, (placeholder, self.mesh.size(), self.by_row, self.axes))
            if placeholder in self.sums:
                layout = self.sums[placeholder]
                value = self.graph.call_function(value_of, (row, (), str(layout), str(of_gradient(layout)), self.axes))
        placeholder.replace_all_uses_with(value, delete_user_cb=lambda user: user is not row)

    def _replicate_operands(self, node: fx.Node) -> None:
        """A local operand of an operator on DTensors counts as a replicated DTensor (``implicit_replication``)."""
        whole = str(Layout.replicated(self.mesh.ndim))
        for source in [n for n in node.all_input_nodes if n in self.local]:
            if isinstance(node.target, HigherOrderOperator):
                what = f"{source.name} is a local tensor, and {node.name} ({node.target}) has operands that are DTensors"
                raise TraceError(what, where=source_line(node), remedy="convert it by from_local before the block")
            with _inserting(self.graph, source, node.prev):
                value = self.graph.call_function(value_of, (source, (), whole, whole, self.axes))
            node.replace_input_with(source, value)


def row_of(stack: Tensor, ranks: int, layout: str, axes: str) -> Tensor:
    """This rank's row of a stack of ``ranks`` rows."""
    row: Tensor = torch.ops.fxshard.to_local(stack, [1, *stack.shape[1:]], layout, layout, axes)
    return row.squeeze(0)


def stack_of(row: Tensor, ranks: int, layout: str, axes: str) -> Tensor:
    """The stack of which ``row`` is this rank's."""
    stack: Tensor = torch.ops.fxshard.from_local(row.unsqueeze(0), [ranks, *row.shape], layout, layout, axes)
    return stack


def declared_value(whole: Tensor, layout: str, axes: str) -> Tensor:
    """The value that a replicated ``from_local`` makes of a whole tensor."""
    value: Tensor = torch.ops.fxshard.placed(whole, layout, axes, True)
    return value


def handed_out(value: Tensor, layout: str, axes: str, form: str) -> Tensor:
    """A value in ``layout`` as the caller, or code on whole tensors, gets it; ``form`` as of ``fxshard.handed_out``."""
    handed: Tensor = torch.ops.fxshard.handed_out(torch.ops.fxshard.placed(value, layout, axes, False), form)
    return handed


def shard_of(value: Tensor, parts: Parts, layout: str, gradient: str, axes: str, where: str) -> Tensor:
    """This rank's shard of a value in ``layout``. ``parts`` as in ``DTensorCall``. Raises TraceError, with the line ``where``, for shards
    of different sizes."""
    shape = list(value.shape)
    for dim, count in parts:
        if shape[dim] % count:
            what = f"to_local takes the shard of {value.shape[dim]} elements in dim {dim}, which are not cut evenly by {axes}"
            raise TraceError(what, where=where or None, remedy="pad the dim, or redistribute to another layout before to_local")
        shape[dim] = shape[dim] // count
    shard: Tensor = torch.ops.fxshard.to_local(value, shape, layout, gradient, axes)
    return shard


def value_of(shard: Tensor, parts: Parts, layout: str, gradient: str, axes: str) -> Tensor:
    """The value of which ``shard`` is this rank's part in ``layout``."""
    shape = list(shard.shape)
    for dim, count in parts:
        shape[dim] = shape[dim] * count
    value: Tensor = torch.ops.fxshard.from_local(shard, shape, layout, gradient, axes)
    return value


COPIES: frozenset[Any] = frozenset({row_of, shard_of, value_of, declared_value, handed_out})
"""In a graph these copy; the calls that they stand for share memory with their argument."""


def _plain_links(graph: fx.Graph, calls: Mapping[fx.Node, DTensorCall]) -> Mapping[fx.Node, set[fx.Node]]:
    """For each plain value those that operators on plain tensors connect with it."""
    links: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "output" or node in calls or node.target is RETURNED or _is_dtensor_operator(node):
            continue
        for source in node.all_input_nodes:
            if _holds(source, Tensor):
                links[node].add(source)
                links[source].add(node)
    return links


def _holds(node: fx.Node, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(node.meta.get("example_value")))


def _is_dtensor_operator(node: fx.Node) -> bool:
    """Whether DTensor runs the operator: one of its operands or results is a DTensor."""
    return node.op.startswith("call") and node.target is not RETURNED and any(_holds(n, DTensor) for n in (node, *node.all_input_nodes))


def _operand(call: fx.Node) -> fx.Node:
    found = call.args[0] if call.args else call.kwargs["local_tensor"]
    assert isinstance(found, fx.Node)
    return found


@contextlib.contextmanager
def _inserting(graph: fx.Graph, node: fx.Node, after: fx.Node | None = None) -> Iterator[None]:
    """Inserts nodes after ``node``, or after another one; they get the user's line and module of ``node``."""
    place = after or node
    end = place.next
    with graph.inserting_before(end):
        yield
    new = place.next
    while new is not end:
        new.meta = {key: value for key, value in node.meta.items() if key in KEPT_META}
        new = new.next


def keep_writes(module: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    """Writes rows that calls with ``tensors`` change in place back to their stacks.

    Raises TraceError for a write to a pending argument, and for another that would show in memory which DTensor's calls share with theirs.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    for node in missed_writes(module, [fake_tensor(t, mode, train=False) for t in tensors], COPIES):
        if node.target is value_of and getattr(node.args[0], "target", None) is row_of:
            what = "an argument that is a pending sum, average, maximum or minimum is changed in place"
            where = source_line(node) or f"argument {node.args[0].args[0]}"
            raise TraceError(what, where=where, remedy="return the new value, and copy it outside of the compiled function")
        if node.target is not row_of:
            what = "a tensor is changed in place whose memory a DTensor shares (from_local, to_local)"
            raise TraceError(what, where=source_line(node), remedy="change a clone of it")
        stack, *described = node.args
        with module.graph.inserting_before(module.graph.output_node()):
            new = module.graph.call_function(stack_of, (node, *described))
            module.graph.call_method("copy_", (stack, new))
    module.recompile()
