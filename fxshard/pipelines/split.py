"""A model as a chain of stage modules, split before given layers.

torch's ``pipeline`` exports the model and splits the graph; submodules, parameters and buffers keep their names. Two changes make the
stages a chain: what depends on buffers only (a table of rotary embeddings, a causal mask) is computed in each stage that reads it, and
every other value that a later stage reads passes through the stages between.
"""

from __future__ import annotations

import itertools
import logging
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import pipeline
from torch.fx.node import map_aggregate

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.capture import captured_out_spec
from fxshard._torch_compat.operators import assert_tensor_metadata
from fxshard._torch_compat.pipelining import PIPE_SPLIT
from fxshard.errors import PlanError, TraceError, closest
from fxshard.pipelines.refusals import check_graph, fixed_starts, is_further_call, modules_of, no_cut, parameters_of

log = logging.getLogger("fxshard")


@dataclass(frozen=True)
class Passed:
    """A value that passes from one stage to the next, or an argument of the model. ``trains``: whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


@dataclass(frozen=True)
class StageModule:
    """``module`` takes ``inputs`` by position and returns ``outputs``, one tensor if there is one; the outputs of the last stage are the
    model's."""

    module: fx.GraphModule
    inputs: tuple[Passed, ...]
    outputs: tuple[Passed, ...]


def split(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], before: Sequence[str]) -> tuple[StageModule, ...]:
    """The stages of ``model``, each but the first beginning with one of the modules ``before``, in the order of their calls.

    Parameters and buffers are the model's own. Raises TraceError if the model cannot be exported, PlanError if pipelines do not support
    it or stages would share a parameter.
    """
    marked = _Marked(tuple(before))
    stages = _split(model, args, kwargs, marked)
    if shared := fixed_starts(("the first layer", *marked.called), [parameters_of(stage.module) for stage in stages], model):
        raise no_cut(shared, marked.called, len(stages))
    if marked.keys:
        what = "the model returns a dict, and torch's schedules pass tensors"
        log.warning("%s: the loss function and the last stage's caller get %s", what, _as_text(marked.keys))
    return stages


def _as_text(keys: Sequence[str]) -> str:
    return f"the tensor {keys[0]!r}" if len(keys) == 1 else f"a tuple, in this order: {', '.join(keys)}"


def split_layers(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[StageModule, ...]]:
    """The names of the layers that ``model`` calls, in order, and a stage for each: what runs before or after a layer belongs to the first
    or to the layer before. Raises as ``split``, and PlanError if there are no layers."""
    marked = _Marked(layers_of(model), every=True)
    stages = _split(model, args, kwargs, marked)
    return marked.called, stages


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules in the outermost lists of ``model`` (``ModuleList``, ``Sequential``, ``ModuleDict``)."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and not any(_is_inside(name, layer) for layer in found):
            found.update({f"{name}.{child}".removeprefix("."): one for child, one in module.named_children()})
    if len(found) < 2:
        what = f"{type(model).__name__} has no list of layers (nn.ModuleList, nn.Sequential, nn.ModuleDict), between which it could be cut"
        raise PlanError(what, remedy="put its layers into an nn.ModuleList, or shard it without a pipeline")
    return tuple(found)


def _is_inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def _split(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], marked: _Marked) -> tuple[StageModule, ...]:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export about its own code
            pipe = pipeline(model, tuple(args), dict(kwargs), split_policy=marked)
    except RuntimeError as error:
        remedy = "torch.export.export(model, args) must work; its error says where it stops"
        raise TraceError(f"the model cannot be split into stages: {error.__cause__ or error}", remedy=remedy) from error
    stages = [pipe.get_stage_module(i) for i in range(pipe.num_stages)]
    for stage in stages:
        _keep_transient(stage, model)
    return _chained(pipe.split_gm.graph, stages, marked.trained)


def _keep_transient(stage: nn.Module, model: nn.Module) -> None:
    """Registers the buffers that ``model`` leaves out of its state_dict as such in ``stage``: export does not."""
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
        if name not in persistent:
            owner, _, last = name.rpartition(".")
            stage.get_submodule(owner).register_buffer(last, buffer, persistent=False)


class _Marked:
    """torch's split policy: marks the beginnings of stages.

    ``every``: a stage begins with each of the modules ``before`` that is called, except the first. ``called``: those that are called, in
    order; ``trained``: the names of values that depend on a trained parameter; ``keys``: those of the dict that the model returns, in
    the order of its tensors. They are known afterwards.
    """

    def __init__(self, before: tuple[str, ...], every: bool = False) -> None:
        self.before, self.every = before, every
        self.trained = frozenset[str]()
        self.called: tuple[str, ...] = ()
        self.keys: tuple[str, ...] = ()

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        check_graph(module)
        self.keys = _keys_of_results(module)
        _make_neutral(module.graph)
        starts = self._starts(module.graph)
        _join_calls(module.graph)
        stage, stage_of = 0, dict[fx.Node, int]()
        for node in list(module.graph.nodes):
            stage += node in starts
            stage_of[node] = stage
        for node in starts:
            with module.graph.inserting_before(node):
                module.graph.call_function(PIPE_SPLIT)
        _recompute(module.graph, _constants(module), stage_of, starts)
        self.trained = _trained(module)
        module.recompile()
        return module

    def _starts(self, graph: fx.Graph) -> list[fx.Node]:
        first: dict[str, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                for name in modules_of(node):
                    first.setdefault(name, node)
        lacking = [name for name in self.before if name not in first]
        if lacking and not self.every:
            raise PlanError(f"the model does not call {lacking[0]!r}{closest(lacking[0], first)}", remedy="name a module that it calls")
        order = {node: i for i, node in enumerate(graph.nodes)}
        self.called = tuple(sorted(set(self.before) - set(lacking), key=lambda name: order[first[name]]))
        return [first[name] for name in self.called[self.every :]]


def _keys_of_results(module: fx.GraphModule) -> tuple[str, ...]:
    """The keys of the dict that the model returns, with one for each tensor: ``state.0`` if its value is a tuple. () if it returns none."""
    spec = captured_out_spec(module)
    result = pytree.tree_unflatten(range(spec.num_leaves), spec)
    if not isinstance(result, Mapping):
        return ()
    leaves, _ = pytree.tree_flatten_with_path(dict(result))
    return tuple(".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves)


def _make_neutral(graph: fx.Graph) -> None:
    """Replaces the device of the example's tensors by the CPU, for which fxshard traces: a bound program names its own. Removes checks of
    dtypes and devices, which export adds."""
    for node in list(graph.nodes):
        if node.target is assert_tensor_metadata:
            graph.erase_node(node)
        elif node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _neutral)


def _neutral(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _join_calls(graph: fx.Graph) -> None:
    """Lets what further calls of a module compute belong to the module around them: torch makes a submodule of each call, whose parameters
    have names with the number of the call."""
    for node in graph.nodes:
        if stack := node.meta.get("nn_module_stack"):
            first = itertools.takewhile(lambda entry: not is_further_call(entry[0], entry[1][0]), stack.items())
            node.meta["nn_module_stack"] = dict(first)


def _constants(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Nodes that depend on neither arguments nor parameters."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        given = node.op == "get_attr" and node.target not in parameters
        computed = node.op == "call_function" and not node.is_impure() and found.issuperset(node.all_input_nodes)
        if given or computed:
            found.add(node)
    return frozenset(found)


def _recompute(graph: fx.Graph, constant: frozenset[fx.Node], stage_of: Mapping[fx.Node, int], starts: Sequence[fx.Node]) -> None:
    """Copies constant values into each later stage that reads them, at its beginning."""
    copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def copied(node: fx.Node, stage: int) -> fx.Node:
        if node.op == "get_attr" or stage_of[node] == stage:
            return node
        if (node, stage) not in copies:
            inputs = {one: copied(one, stage) for one in node.all_input_nodes}
            with graph.inserting_before(starts[stage - 1]):
                copies[node, stage] = graph.node_copy(node, inputs.__getitem__)
        return copies[node, stage]

    for node in list(stage_of):
        for user in list(node.users) if node in constant and node.op == "call_function" else ():
            if user in stage_of and user not in constant and stage_of[user] > stage_of[node]:
                user.replace_input_with(node, copied(node, stage_of[user]))


def _trained(module: fx.GraphModule) -> frozenset[str]:
    parameters = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.target in parameters if node.op == "get_attr" else not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(node.name for node in found)


def _chained(graph: fx.Graph, stages: Sequence[fx.GraphModule], trained: frozenset[str]) -> tuple[StageModule, ...]:
    """The stages, with the values that pass through each."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    values = _values(graph, calls, stages, trained)
    made = {node: -1 if node.op == "placeholder" else calls.index(node if node.op == "call_module" else node.args[0]) for node in values}
    last: dict[fx.Node, int] = {}
    for i, reader in enumerate((*calls, graph.output_node())):
        last.update(dict.fromkeys(reader.all_input_nodes, i))
    inputs = [[node for node in values if node.op == "placeholder"]]
    for i in range(1, len(calls)):
        crossing = [node for node in values if made[node] < i <= last.get(node, -1)]
        inputs.append(sorted(crossing, key=lambda node: not values[node].trains))
    outputs = [*inputs[1:], list(graph.output_node().all_input_nodes)]
    for call, module, taken, given in zip(calls, stages, inputs, outputs, strict=True):
        _rewire(module, call, {node: values[node].name for node in taken}, given)
    ends = [[tuple(values[node] for node in one) for one in side] for side in (inputs, outputs)]
    return tuple(map(StageModule, stages, *ends))


def _values(graph: fx.Graph, calls: Sequence[fx.Node], stages: Sequence[fx.GraphModule], trained: frozenset[str]) -> dict[fx.Node, Passed]:
    """The arguments, and the values between stages, described as in the stage that reads them."""
    ends = [(node, node) for node in graph.nodes if node.op == "placeholder"]
    for call, module in zip(calls, stages, strict=True):
        ends += [(given, taken) for given, taken in zip(call.args, module.graph.find_nodes(op="placeholder"), strict=True)]
        results = _results(module.graph)
        picked = {user: results[user.args[1]] for user in call.users if user.target is operator.getitem} or {call: results[0]}
        ends += [(node, end) for node, end in picked.items() if graph.output_node() in node.users]
    found: dict[fx.Node, Passed] = {}
    for node, end in ends:
        value = end.meta.get("val")
        if isinstance(value, torch.Tensor):
            trains = node.op != "placeholder" and value.is_floating_point() and end.name in trained
            found[node] = Passed(end.name, tuple(value.shape), value.dtype, trains)
    return {node: found[node] for node in graph.nodes if node in found}


def _results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    given = graph.output_node().args[0]
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _rewire(module: fx.GraphModule, call: fx.Node, inputs: Mapping[fx.Node, str], outputs: Sequence[fx.Node]) -> None:
    """Makes the stage take ``inputs`` and return ``outputs``, nodes of the graph of stages, in this order. ``inputs`` gives their names."""
    before = dict(zip(call.args, module.graph.find_nodes(op="placeholder"), strict=True))
    graph = fx.Graph(module)
    taken: dict[fx.Node, fx.Node] = {}
    for node, name in inputs.items():
        taken[node] = graph.placeholder(name)
        taken[node].meta = dict(before.get(node, node).meta)
    copies = {old: taken.get(node) for node, old in before.items()}
    results = graph.graph_copy(module.graph, copies)
    every = results if isinstance(results, list | tuple) else (results,)
    given = [taken[n] if n in taken else every[0] if n is call else every[n.args[1]] for n in outputs]
    graph.output(given[0] if len(given) == 1 else tuple(given))
    module.graph = graph
    module.recompile()
