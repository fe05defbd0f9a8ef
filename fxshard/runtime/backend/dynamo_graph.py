"""From a Dynamo graph to a PlanningGraph: names inputs and outputs as the user does, and turns scalars into constants."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dtensor.packed import without_strides
from fxshard._torch_compat.dynamo.capture import dynamo_frame, dynamo_source
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.passes.trace.fakes.fake_model import fake_tensor
from fxshard.passes.trace.fakes.symbols import Symbols
from fxshard.passes.trace.fakes.tensor_kinds import check_dense
from fxshard.passes.trace.functions.flex import expand_flex_attention
from fxshard.passes.trace.returned import note_calls
from fxshard.passes.trace.rewrites.shared_memory import guard_shared_memory
from fxshard.passes.trace.trace import fresh, joint_graph, planning_graph, separate_outputs
from fxshard.passes.trace.trace_errors import readable_errors
from fxshard.runtime.backend.dtensors.local_parts import NO_ENDS, LocalEnds, keep_writes, replace_dtensor_calls
from fxshard.runtime.backend.dtensors.loss_parallel import keep_classes_sharded
from fxshard.runtime.backend.graph_outputs import Output, find_outputs
from fxshard.runtime.backend.graph_sizes import OpenSize, open_sizes, sizes_of_stacks
from fxshard.shapes import DynamicDim

ACCELERATOR = re.compile(r"(cuda|xpu|mps)(:\d+)?")
RESUME_PREFIX = "torch_dynamo_resume_in_"
GRAPH, REMEDY = "the graph that torch.compile captured", "run the model without torch.compile; if that works, please report it"


@dataclass(frozen=True)
class DynamoGraph:
    """A copy of a Dynamo graph, and what Dynamo knew of it.

    For each placeholder: ``names``, ``kinds`` (``parameter``, ``buffer``, ``input``, ``scalar``) and ``arguments``, its index among the
    function's arguments. ``distributed``: for each output, whether the user's program sees a DTensor there. ``fragment``: whether a graph
    break made this one of several graphs of the model. ``sizes``: the sizes that Dynamo left open. ``ends``: where local tensors enter and
    leave; in ``sizes`` and ``module`` the inputs among them are stacks (see ``local_parts``). ``predicted``: for each output that is
    computed and a DTensor of shards, its layout in eager execution.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    arguments: tuple[int, ...]
    distributed: tuple[bool, ...]
    fragment: bool
    sizes: tuple[OpenSize, ...] = ()
    ends: LocalEnds = NO_ENDS
    predicted: tuple[Layout | None, ...] = ()

    @property
    def symbolic(self) -> bool:
        """Whether the graph takes numbers, so that it serves calls of several sizes or numbers."""
        return "scalar" in self.kinds

    @property
    def tensor_places(self) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind != "scalar"]

    @cached_property
    def open_tensors(self) -> list[int]:
        """The placeholders of tensors with an open size."""
        return sorted({i for size in self.sizes for i, _ in size.places})

    @cached_property
    def numbers(self) -> list[int]:
        """The placeholders of numbers that are not sizes and that some node uses."""
        of_sizes = {i for size in self.sizes for i in size.numbers}
        used = [bool(n.users) for n in self.module.graph.nodes if n.op == "placeholder"]
        return [i for i, kind in enumerate(self.kinds) if kind == "scalar" and used[i] and i not in of_sizes]


def read_graph(module: fx.GraphModule, example_inputs: Sequence[Any], predict: bool = True) -> DynamoGraph:
    """Copies ``module`` and reads what Dynamo knows about its inputs and outputs. ``predict``: whether
    results that are DTensors have the layouts of eager execution; if not, the plan chooses."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    sources = [dynamo_source(n) for n in placeholders]
    kinds = [_kind(source, example, scalar) for (source, scalar), example in zip(sources, example_inputs, strict=True)]
    names: list[str] = []
    for node, (source, _) in zip(placeholders, sources, strict=True):
        name = user_name(source) if source else node.name
        names.append(name if name not in names else source or node.name)
    outputs = pytree.tree_leaves(module.graph.output_node().args[0])
    distributed = tuple(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), DTensor) for o in outputs)
    reason = getattr(module, "compile_subgraph_reason", None)
    frame, variables = dynamo_frame()
    fragment = bool(getattr(reason, "graph_break", False)) or frame.startswith(RESUME_PREFIX)
    arguments = tuple(_argument_index(source, variables) for source, _ in sources)
    predicted = tuple(_predicted(o) if predict else None for o in outputs)
    copied, ends = _rewritten(module, predict)
    kinds = ["input" if i in ends.inputs else kind for i, kind in enumerate(kinds)]
    distributed = tuple(one or i in ends.shards | ends.rows for i, one in enumerate(distributed))
    sizes = sizes_of_stacks(open_sizes(placeholders), ends.inputs)
    return DynamoGraph(copied, tuple(names), tuple(kinds), arguments, distributed, fragment, sizes, ends, predicted)


def _predicted(output: Any) -> Layout | None:
    value = output.meta.get("example_value") if isinstance(output, fx.Node) and output.op != "placeholder" else None
    placements = without_strides(value.placements) if isinstance(value, DTensor) else []
    return Layout(placements) if placements and all(type(p) in (Shard, Replicate) for p in placements) else None


def _argument_index(source: str, variables: Sequence[str]) -> int:
    root = re.match(r"L\['(\w+)'\]", source)
    return variables.index(root.group(1)) if root is not None and root.group(1) in variables else len(variables)


def _kind(source: str, example: Any, scalar: bool) -> str:
    if scalar or not isinstance(example, torch.Tensor):
        return "scalar"
    if isinstance(example, nn.Parameter):
        return "parameter"
    if example.requires_grad:  # a buffer has no gradient
        return "input"
    return "buffer" if "_buffers[" in source or source.startswith("L['self'].") else "input"


def user_name(source: str) -> str:
    """The user's name for a value, from Dynamo's source expression.

    ``L['self']._modules['up']._parameters['weight']`` -> ``up.weight``, ``L['batch']['x']`` -> ``batch['x']``.
    """
    root = re.match(r"[LG]\['(\w+)'\]", source)
    if root is None:
        return source
    rest = source[root.end() :]
    of_module = root.group(1) == "self" or re.match(r"\._(modules|parameters|buffers)\['", rest)
    rest = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", rest)
    return rest.removeprefix(".") if of_module and rest else root.group(1) + rest


def _rewritten(module: fx.GraphModule, terms: bool) -> tuple[fx.GraphModule, LocalEnds]:
    """(a copy of Dynamo's graph with the names of its modules' results, without DTensor's calls; where local tensors enter and leave)."""
    copied = _copy(module)
    expand_flex_attention(copied)
    note_calls(copied.graph)
    keep_classes_sharded(copied.graph)
    ends = replace_dtensor_calls(copied.graph, terms)
    for node in copied.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k not in ("grapharg", "example_value")}
    return copied, ends


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def specialised(
    graph: DynamoGraph, args: Sequence[Any], views: bool = True
) -> tuple[fx.GraphModule, list[torch.Tensor], tuple[Output, ...]]:
    """``graph`` for the numbers of one call: (module that takes tensors and returns the computed outputs, its inputs, all outputs).

    Sizes are read from the tensors. ``views``: whether to detect outputs that are views.
    """
    for name, value in zip(graph.names, args, strict=True):
        if isinstance(value, torch.Tensor):
            check_dense(value, name)
    module = _copy(graph.module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for size in graph.sizes:
        for i in size.numbers:
            _read_from(placeholders[i], placeholders[size.places[0][0]], size.places[0][1], placeholders[-1])
    of_sizes = {i for size in graph.sizes for i in size.numbers}
    for i, (node, kind, value) in enumerate(zip(placeholders, graph.kinds, args, strict=True)):
        if kind == "scalar" and i not in of_sizes:
            _make_constant(node, value)
    tensors = [value for kind, value in zip(graph.kinds, args, strict=True) if kind != "scalar"]
    module.recompile()
    with readable_errors(GRAPH, REMEDY):
        if graph.ends.device_mesh is not None:
            keep_writes(module, tensors)
        outputs = find_outputs(module, tensors, graph.distributed, views)
        ends = graph.ends
        outputs = tuple(replace(one, row=i in ends.rows, terms=ends.terms.get(i)) for i, one in enumerate(outputs))
    end = module.graph.output_node()
    end.args = (tuple(node for node, output in zip(pytree.tree_leaves(end.args[0]), outputs, strict=True) if output.computed),)
    module.recompile()
    return module, tensors, outputs


def _read_from(node: fx.Node, tensor: fx.Node, dim: int, last: fx.Node) -> None:
    """Replaces the placeholder of a size by ``tensor.size(dim)``, inserted after the ``last`` placeholder."""
    if node.users:
        with node.graph.inserting_after(last):
            node.replace_all_uses_with(node.graph.call_method("size", (tensor, dim)))
    node.graph.erase_node(node)


def _make_constant(node: fx.Node, value: Any) -> None:
    """Replaces the placeholder of a number by this call's value; Dynamo passes a float as a tensor, which the graph reads by ``item``."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    for user in list(node.users):
        if user.op == "call_method" and user.target == "item":
            _substitute(user, number)
        else:
            _replace_operand(user, node, number)
    node.graph.erase_node(node)


def _substitute(node: fx.Node, number: Any) -> None:
    for user in list(node.users):
        _replace_operand(user, node, number)
    node.graph.erase_node(node)


def _replace_operand(user: fx.Node, old: fx.Node, new: Any) -> None:
    user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: new if n is old else n)


def trace_graph(
    module: fx.GraphModule,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    kinds: Sequence[str],
    dims: Sequence[DynamicDim] = (),
    cache: bool = False,
) -> PlanningGraph:
    """Traces ``module`` on plain CPU fakes of the tensors' global shapes, with the backward if gradients are needed.

    ``dims`` (with symbolic sizes) and ``cache`` are those of ``fxshard.passes.trace.trace``. Raises TraceError with the user's line if
    tracing fails.
    """
    train = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    _to_cpu(module)
    symbols = Symbols(dims)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.env.shape_env)
    count = len(pytree.tree_leaves(module.graph.output_node().args[0]))
    with readable_errors(GRAPH, REMEDY), symbols:
        flat = [symbols.fake(name, fake_tensor(t, mode, train)) for name, t in zip(names, tensors, strict=True)]
        guard_shared_memory(module, flat, fresh)
        separate_outputs(module, flat)
        joint = joint_graph(module, flat, train, cache=cache)
        spec = pytree.tree_structure(list(range(count)))
        graph = planning_graph(joint, {}, names, pytree.tree_structure(list(range(len(tensors)))), spec, train, {})
        graph = symbols.at_example(graph)
    kind = dict(zip(names, kinds, strict=True))
    ends = tuple(replace(i, kind=kind[i.name]) if i.kind == "input" else i for i in graph.inputs)
    return replace(graph, inputs=ends)


def _to_cpu(module: fx.GraphModule) -> None:
    """Replaces devices that the graph names by the CPU, on which tracing runs."""
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "cpu", node.args[:1], {}
        node.args, node.kwargs = pytree.tree_map_only((torch.device, str), _cpu, (node.args, dict(node.kwargs)))
    module.recompile()


def _cpu(value: torch.device | str) -> torch.device | str:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return "cpu" if ACCELERATOR.fullmatch(value) else value


def autocast_on_cpu(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast is on for the CPU fakes if it is on for ``device``, with the same dtype."""
    if device == "cpu" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype(device))
