"""Joint graphs on disk: a later process takes from a file what AOTAutograd made of the same captured graph.

The key holds the captured graph (calls, arguments, constants, source lines), shapes, strides and marks of all tensors that it reads and
which of them share memory, settings and states of torch, and the code of torch and fxshard. Where any of these has no text of its own
(operators of the user's, subgraphs, symbols, active modes) nothing is looked up. Decision 0042.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxshard import disk_cache
from fxshard._torch_compat import FakeTensor, FakeTensorMode
from fxshard._torch_compat.tracing import tracing_state
from fxshard.errors import FxshardError
from fxshard.files import atomic_file, make_folder, read_bytes
from fxshard.passes.trace.joint_data import (
    KEPT,
    LIBRARIES,
    STACKS,
    Memory,
    Modules,
    NotData,
    graph_as_data,
    graph_of_data,
    name_of_function,
    plain,
)

log = logging.getLogger("fxshard")
KIND = "joint-v1"
UNREAD = frozenset(
    (
        *("example_value", "val", "tensor_dict", "grapharg"),  # what tensors are is said of the ends
        *("from_node", "source_fn_stack", "creation_timestamp", "desc", "seq_nr"),
    )
)
"""Notes on a captured node that do not decide what becomes of it."""


def cached(
    make: Callable[[], fx.GraphModule], captured: fx.GraphModule, args: Sequence[Any], how: Sequence[Any], forms: Mapping[Any, Any]
) -> fx.GraphModule:
    """The joint graph that ``make`` gives for a captured graph, from the cache where it is there, and kept there else.

    ``args``: the fakes that the graph is called with, None for those that are no tensors. ``how``: plain values that decide more.
    ``forms``: the decompositions of operators.
    """
    mode = _mode(captured, args)
    path = None if mode is None else _file(captured, args, how, forms)
    if path is None or mode is None:
        return make()
    found = _read(path, mode)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _mode(captured: fx.GraphModule, args: Sequence[Any]) -> FakeTensorMode | None:
    """The one mode of all the fakes."""
    tensors = [*captured.parameters(), *captured.buffers(), *(a for a in args if a is not None)]
    modes = {id(one.fake_mode): one.fake_mode for one in tensors if isinstance(one, FakeTensor)}
    return next(iter(modes.values())) if len(modes) == 1 else None


def _file(captured: fx.GraphModule, args: Sequence[Any], how: Sequence[Any], forms: Mapping[Any, Any]) -> Path | None:
    state = tracing_state()
    if state is None:
        return None
    try:
        decompositions = [[str(op), _home(function)] for op, function in forms.items()]
        memory = Memory()
        tensors = [*captured.named_parameters(remove_duplicate=False), *captured.named_buffers(remove_duplicate=False)]
        ends = [[name, isinstance(one, torch.nn.Parameter), memory.described(one)] for name, one in tensors]
        given = [memory.described(one) for one in args]
        modules = Modules()
        nodes = [_said(node, dict(tensors), modules) for node in captured.graph.nodes]
    except NotData as error:
        log.debug("no joint graph is looked up in the cache: the graph has %s", error)
        return None
    return disk_cache.file_for(KIND, nodes=nodes, tensors=ends, given=given, how=list(how), state=state, decompositions=decompositions)


def _home(function: Any) -> str:
    """The module of a decomposition; raises NotData for one of the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] not in LIBRARIES:
        raise NotData(f"a decomposition from {module}")
    return str(module)


def _said(node: fx.Node, tensors: dict[str, Any], modules: Modules) -> str:
    """All that decides what becomes of a captured node, as text."""
    match node.op:
        case "call_function":
            target = name_of_function(node.target)
        case "get_attr" if node.target not in tensors:
            raise NotData(f"an attribute that is no tensor of the model: {node.target}")
        case "placeholder" | "get_attr" | "call_method" | "output":
            target = str(node.target)
        case _:
            raise NotData(node.op)
    arguments = plain([list(node.args), dict(node.kwargs)], lambda one: one.name)
    meta = [[key, _meta(key, value, modules)] for key, value in sorted(node.meta.items()) if key not in UNREAD]
    return json.dumps([node.op, node.name, target, arguments, meta])


def _meta(key: str, value: Any, modules: Modules) -> Any:
    if key in STACKS:
        return modules.described(value)
    if key in KEPT:
        return plain(value, lambda one: one.name)
    raise NotData(f"a note on a node: {key}")


def _read(path: Path, mode: FakeTensorMode) -> fx.GraphModule | None:
    """None where there is no file, or a damaged one, which is said."""
    if not path.exists():
        return None
    try:
        digest, _, text = read_bytes(path).partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise NotData("its digest is another")
        found = graph_of_data(json.loads(text), mode)
    except (FxshardError, NotData, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        log.warning("the traced graph in the cache, %s, is not used and is made again: %s", path, error)
        return None
    disk_cache.touch(path)
    log.info("the traced graph is from the cache: %s", path)
    return found


def _write(path: Path, joint: fx.GraphModule) -> None:
    try:
        text = json.dumps(graph_as_data(joint)).encode()
    except NotData as error:
        log.debug("a joint graph is not kept: it has %s", error)
        return
    try:
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    except FxshardError as error:
        log.warning("the traced graph is not kept for the next start: %s (%s)", error.what, path)
        return
    disk_cache.forget(path.parent, f"{KIND}-*.json")
