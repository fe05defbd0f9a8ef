"""Traced graphs as plain data: what a file says of a joint graph, and what a key says of the graph that it is made of.

Operators are named, never stored; tensors are shapes, strides and which of them share memory. ``NotData`` is raised for whatever has no
such form: constants, subgraphs, operators and functions of the user's, symbols.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import FakeTensor, FakeTensorMode, OpOverload, lazy_graph_module, storage_key
from fxshard._torch_compat.tracing import end_as_data, end_of_data

NAMESPACES = ("aten", "prims", "fxshard")
"""Of operators whose code is torch's or fxshard's."""
LIBRARIES = ("torch", "_operator", "math", "fxshard")
"""Whose functions may be called in a graph of Dynamo's."""
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
KEPT = ("stack_trace", "partitioner_tag", "recompute", "ac_graph_id", "seq_nr", "autograd_backward", "is_gradient_acc", "custom")
"""What passes read of a node's ``meta``, besides its value, its modules and the description of an end."""
WORDS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


class NotData(Exception):
    """Something in a graph has no form as plain data."""


def plain(value: Any, node: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a call as what JSON can hold; ``node`` says what stands for a node."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case fx.Node():
            return {"node": node(value)}
        case tuple():
            return {"tuple": [plain(one, node) for one in value]}
        case list():
            return [plain(one, node) for one in value]
        case slice():
            return {"slice": [plain(one, node) for one in (value.start, value.stop, value.step)]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: plain(one, node) for key, one in value.items()}}
        case torch.device():
            return {"device": str(value)}
        case _ if type(value) in WORDS:
            return {WORDS[type(value)]: str(value).removeprefix("torch.")}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
    raise NotData(type(value).__name__)


def unplain(data: Any, nodes: Sequence[fx.Node]) -> Any:
    """What ``plain`` was given; a node is its number among ``nodes``."""
    if isinstance(data, list):
        return [unplain(one, nodes) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    match kind:
        case "node":
            return nodes[value]
        case "tuple":
            return tuple(unplain(one, nodes) for one in value)
        case "dict":
            return {key: unplain(one, nodes) for key, one in value.items()}
        case "slice":
            return slice(*(unplain(one, nodes) for one in value))
        case "float":
            return float(value)
        case "device":
            return torch.device(value)
        case "ellipsis":
            return Ellipsis
    (found,) = (word for word, name in WORDS.items() if name == kind)
    word = getattr(torch, value)
    if not isinstance(word, found):
        raise NotData(f"{value} is no {kind}")
    return word


def name_of_function(target: Any) -> str:
    """The name under which a function of torch's is found again; raises NotData for all others."""
    if isinstance(target, OpOverload):
        if target.namespace not in NAMESPACES:
            raise NotData(str(target))
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if module.partition(".")[0] not in LIBRARIES or getattr(sys.modules.get(module), name, None) is not target:
        raise NotData(f"{module}.{name}")
    return f"{module}.{name}"


def _operator_named(name: str) -> Any:
    if name == GETITEM:
        return operator.getitem
    namespace, packet, overload = name.removeprefix("torch.ops.").split(".")
    if namespace not in NAMESPACES:
        raise NotData(name)
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):
        raise NotData(name)
    return found


GETITEM = name_of_function(operator.getitem)


class Modules:
    """Numbers for modules, which Dynamo tells apart by their ids, in the order in which they are met."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def described(self, stack: Mapping[str, tuple[str, Any]]) -> list[tuple[str, str]]:
        """(number, path) of the calls of modules that a node was made in, the outermost first."""
        return [(self.numbers.setdefault(key, str(len(self.numbers))), path) for key, (path, _) in stack.items()]


class Memory:
    """Numbers for what tensors share their memory, in the order in which they are met; keeps the tensors, so that no number is reused."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.sizes: list[int] = []
        self._kept: list[torch.Tensor] = []

    def described(self, value: Any) -> Any:
        """A fake CPU tensor, or a list of them, as data."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return {"list" if isinstance(value, list) else "tuple": [self.described(one) for one in value]}
        known = isinstance(value, FakeTensor) and type(value) in (FakeTensor, torch.nn.Parameter) and value.constant is None
        if not known or value.device.type != "cpu" or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise NotData(f"a value: {type(value).__name__}")
        numbers = [*value.shape, *value.stride(), value.storage_offset()]
        if any(type(number) is not int for number in numbers):
            raise NotData("a symbol")
        key = storage_key(value)
        if key not in self.numbers:
            self.numbers[key] = len(self.sizes)
            self.sizes.append(value.untyped_storage().nbytes())
            self._kept.append(value)
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return [dtype, shape, list(value.stride()), value.storage_offset(), self.numbers[key], value.requires_grad]


class Fakes:
    """Fakes of ``mode`` from what ``Memory`` says of them."""

    def __init__(self, sizes: Sequence[int], mode: FakeTensorMode) -> None:
        self.memory = [torch.UntypedStorage(size, device="meta") for size in sizes]
        self.mode = mode

    def made(self, data: Any) -> Any:
        if data is None:
            return None
        if isinstance(data, dict):
            ((kind, parts),) = data.items()
            made = [self.made(one) for one in parts]
            return made if kind == "list" else tuple(made)
        name, shape, stride, offset, memory, requires_grad = data
        dtype = getattr(torch, name)
        meta = torch.empty(0, dtype=dtype, device="meta").set_(self.memory[memory], offset, shape, stride)
        fake = FakeTensor(self.mode, meta, torch.device("cpu"))
        return fake.requires_grad_() if requires_grad else fake


def graph_as_data(module: fx.GraphModule) -> dict[str, Any]:
    """A joint graph of AOTAutograd's; raises NotData for what a file cannot hold."""
    numbers: dict[fx.Node, int] = {}
    memory, modules, nodes = Memory(), Modules(), []
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotData(node.op)
        target = name_of_function(node.target) if node.op == "call_function" else node.target
        if node.op == "call_function" and not (target.startswith("torch.ops.") or target == GETITEM):
            raise NotData(target)
        args = [plain(one, numbers.__getitem__) for one in (list(node.args), dict(node.kwargs))]
        nodes.append([node.op, node.name, target, *args, _meta(node, memory, modules)])
        numbers[node] = len(numbers)
    return {"nodes": nodes, "memory": memory.sizes}


def _meta(node: fx.Node, memory: Memory, modules: Modules) -> dict[str, Any]:
    said: dict[str, Any] = {key: plain(node.meta[key], _no_node) for key in KEPT if key in node.meta}
    said |= {key: modules.described(node.meta[key]) for key in STACKS if key in node.meta}
    if "val" in node.meta:
        said["val"] = memory.described(node.meta["val"])
    if "desc" in node.meta:
        said["desc"] = _ends(node.meta["desc"])
    return said


def _no_node(node: fx.Node) -> Any:
    raise NotData(f"a node beside the arguments: {node}")


def _ends(described: Any) -> Any:
    if described is None:
        return None
    if isinstance(described, (list, tuple)):
        return [_ends(one) for one in described]
    data = end_as_data(described)
    if data is None:
        raise NotData(f"an end: {type(described).__name__}")
    return data


def graph_of_data(data: Mapping[str, Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The graph that ``graph_as_data`` described, with fakes of ``mode``."""
    graph, nodes, fakes = fx.Graph(), list[fx.Node](), Fakes(data["memory"], mode)
    for op, name, target, args, kwargs, meta in data["nodes"]:
        function = _operator_named(target) if op == "call_function" else target
        node = graph.create_node(op, function, tuple(unplain(args, nodes)), unplain(kwargs, nodes), name=name)
        node.name = name
        node.meta = {key: unplain(meta[key], nodes) for key in KEPT if key in meta}
        node.meta |= {key: {name: (path, None) for name, path in meta[key]} for key in STACKS if key in meta}
        if "val" in meta:
            node.meta["val"] = fakes.made(meta["val"])
        if "desc" in meta:
            node.meta["desc"] = _ends_of(meta["desc"])
        nodes.append(node)
    return lazy_graph_module(graph)


def _ends_of(data: Any) -> Any:
    if data is None:
        return None
    return [_ends_of(one) for one in data] if isinstance(data, list) else end_of_data(data)
