"""Joint graphs on disk: a later process reads the joint graph that AOTAutograd made of the same captured graph.

The key consists of the captured graph (calls, arguments, constants, source lines), the metadata of all its input tensors and the memory
that they share, torch's settings and state, and the code of torch and fxshard. If any of these cannot be written as text (operators of
the user, subgraphs, symbolic sizes, active modes), the cache is not used. Decision 0042.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxshard import disk_cache
from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode
from fxshard._torch_compat.tracing import tracing_state
from fxshard.errors import FileError
from fxshard.graph.json_values import TRUSTED_LIBRARIES, NotSerializable, function_name, to_json
from fxshard.passes.trace.joint_json import MODULE_STACKS, STORED_META, ModuleIds, StorageIds, graph_from_json, graph_to_json

log = logging.getLogger("fxshard")
WHAT = "the traced graph"
IGNORED_META = frozenset(
    (
        *("example_value", "val", "tensor_dict", "grapharg"),  # the key describes the tensors themselves
        *("from_node", "source_fn_stack", "creation_timestamp", "desc", "seq_nr"),
    )
)
"""Metadata of a captured node that does not influence its joint graph."""


def cached(
    make: Callable[[], fx.GraphModule],
    captured: fx.GraphModule,
    args: Sequence[Any],
    options: Sequence[Any],
    decompositions: Mapping[Any, Any],
) -> fx.GraphModule:
    """The joint graph of a captured graph, read from the cache; if it is not there, ``make()`` gives it and it is written.

    ``args``: the fake tensors with which the graph is called, None for other arguments. ``options``: further plain values that the
    result depends on. ``decompositions``: functions by operator.
    """
    mode = _mode(captured, args)
    path = None if mode is None else _file(captured, args, options, decompositions)
    if path is None or mode is None:
        return make()
    found = disk_cache.read(path, WHAT, lambda text: _parse(text, mode))
    if found is None:
        found = make()
        _write(path, found)
    else:
        log.info("the traced graph is from the cache: %s", path)
    return found


def _mode(captured: fx.GraphModule, args: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of all tensors; None if they have several or none."""
    tensors = [*captured.parameters(), *captured.buffers(), *(a for a in args if a is not None)]
    modes = {id(one.fake_mode): one.fake_mode for one in tensors if isinstance(one, FakeTensor)}
    return next(iter(modes.values())) if len(modes) == 1 else None


def _file(captured: fx.GraphModule, args: Sequence[Any], options: Sequence[Any], decompositions: Mapping[Any, Any]) -> Path | None:
    state = tracing_state()
    if state is None:
        return None
    try:
        functions = [[str(op), _home_module(function)] for op, function in decompositions.items()]
        memory = StorageIds()
        tensors = [*captured.named_parameters(remove_duplicate=False), *captured.named_buffers(remove_duplicate=False)]
        ends = [[name, isinstance(one, torch.nn.Parameter), memory.describe(one)] for name, one in tensors]
        given = [memory.describe(one) for one in args]
        modules = ModuleIds()
        nodes = [_node_text(node, dict(tensors), modules) for node in captured.graph.nodes]
    except NotSerializable as error:
        log.debug("no joint graph is looked up in the cache: the graph has %s", error)
        return None
    asked = {"nodes": nodes, "tensors": ends, "given": given, "options": list(options), "state": state, "decompositions": functions}
    return disk_cache.file_for("joint", **asked)


def _home_module(function: Any) -> str:
    """The module of a decomposition; raises NotSerializable if it is the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] not in TRUSTED_LIBRARIES:
        raise NotSerializable(f"a decomposition from {module}")
    return str(module)


def _node_text(node: fx.Node, tensors: dict[str, Any], modules: ModuleIds) -> str:
    """Everything about a captured node that its joint graph depends on, as text."""
    match node.op:
        case "call_function":
            target = function_name(node.target)
        case "get_attr" if node.target not in tensors:
            raise NotSerializable(f"an attribute that is not a tensor of the model: {node.target}")
        case "placeholder" | "get_attr" | "call_method" | "output":
            target = str(node.target)
        case _:
            raise NotSerializable(node.op)
    arguments = to_json([list(node.args), dict(node.kwargs)], lambda one: one.name)
    meta = [[key, _meta(key, value, modules)] for key, value in sorted(node.meta.items()) if key not in IGNORED_META]
    return json.dumps([node.op, node.name, target, arguments, meta])


def _meta(key: str, value: Any, modules: ModuleIds) -> Any:
    if key in MODULE_STACKS:
        return modules.describe(value)
    if key in STORED_META:
        return to_json(value, lambda one: one.name)
    raise NotSerializable(f"unknown metadata on a node: {key}")


def _parse(text: bytes, mode: FakeTensorMode) -> fx.GraphModule:
    """The graph in a file; raises FileError for a text that ``graph_to_json`` does not write."""
    try:
        return graph_from_json(json.loads(text), mode)
    except (NotSerializable, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise FileError(str(error)) from error


def _write(path: Path, joint: fx.GraphModule) -> None:
    try:
        text = json.dumps(graph_to_json(joint))
    except NotSerializable as error:
        log.debug("a joint graph is not kept: it has %s", error)
        return
    disk_cache.write(path, WHAT, lambda: text)
