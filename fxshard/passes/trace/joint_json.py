"""Joint graphs as JSON, and the parts of captured graphs that enter a cache key.

Operators are stored by name, tensors as shapes and strides with a number for the memory that they share. ``NotSerializable`` is raised for
everything else: constants, subgraphs, operators and functions of the user, symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode, storage_key
from fxshard._torch_compat.nodes import lazy_graph_module
from fxshard._torch_compat.tracing import descriptor_from_json, descriptor_to_json
from fxshard.graph.json_values import GETITEM, NotSerializable, from_json, function_name, operator_of, to_json

MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
STORED_META = ("stack_trace", "partitioner_tag", "recompute", "ac_graph_id", "seq_nr", "autograd_backward", "is_gradient_acc", "custom")
"""Metadata of nodes that passes read, besides values, module stacks and AOTAutograd's descriptors."""


class ModuleIds:
    """Numbers modules, which Dynamo identifies by their ids, in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def describe(self, stack: Mapping[str, tuple[str, Any]]) -> list[tuple[str, str]]:
        """(number, path) of each module call around a node, the outermost first."""
        return [(self.numbers.setdefault(key, str(len(self.numbers))), path) for key, (path, _) in stack.items()]


class StorageIds:
    """Numbers storages in the order of their first use. Keeps a tensor of each alive, so that no address is reused."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.sizes: list[int] = []
        self._kept: list[torch.Tensor] = []

    def describe(self, value: Any) -> Any:
        """A fake CPU tensor, or a list of them: [dtype, shape, strides, offset, storage number, requires_grad], sizes in elements."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return {"list" if isinstance(value, list) else "tuple": [self.describe(one) for one in value]}
        known = isinstance(value, FakeTensor) and type(value) in (FakeTensor, torch.nn.Parameter) and value.constant is None
        if not known or value.device.type != "cpu" or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise NotSerializable(f"a value: {type(value).__name__}")
        numbers = [*value.shape, *value.stride(), value.storage_offset()]
        if any(type(number) is not int for number in numbers):
            raise NotSerializable("a symbol")
        key = storage_key(value)
        if key not in self.numbers:
            self.numbers[key] = len(self.sizes)
            self.sizes.append(value.untyped_storage().nbytes())
            self._kept.append(value)
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return [dtype, shape, list(value.stride()), value.storage_offset(), self.numbers[key], value.requires_grad]


class FakeMaker:
    """Makes fake tensors of ``mode`` from the descriptions of ``StorageIds``."""

    def __init__(self, sizes: Sequence[int], mode: FakeTensorMode) -> None:
        self.memory = [torch.UntypedStorage(size, device="meta") for size in sizes]
        self.mode = mode

    def make(self, data: Any) -> Any:
        if data is None:
            return None
        if isinstance(data, dict):
            ((kind, parts),) = data.items()
            made = [self.make(one) for one in parts]
            return made if kind == "list" else tuple(made)
        name, shape, stride, offset, memory, requires_grad = data
        dtype = getattr(torch, name)
        meta = torch.empty(0, dtype=dtype, device="meta").set_(self.memory[memory], offset, shape, stride)
        fake = FakeTensor(self.mode, meta, torch.device("cpu"))
        return fake.requires_grad_() if requires_grad else fake


def graph_to_json(module: fx.GraphModule) -> dict[str, Any]:
    """A joint graph as JSON values; raises NotSerializable."""
    numbers: dict[fx.Node, int] = {}
    memory, modules, nodes = StorageIds(), ModuleIds(), []
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotSerializable(node.op)
        target = function_name(node.target) if node.op == "call_function" else node.target
        if node.op == "call_function" and not (target.startswith("torch.ops.") or target == GETITEM):
            raise NotSerializable(target)
        args = [to_json(one, numbers.__getitem__) for one in (list(node.args), dict(node.kwargs))]
        nodes.append([node.op, node.name, target, *args, _meta(node, memory, modules)])
        numbers[node] = len(numbers)
    return {"nodes": nodes, "memory": memory.sizes}


def _meta(node: fx.Node, memory: StorageIds, modules: ModuleIds) -> dict[str, Any]:
    said: dict[str, Any] = {key: to_json(node.meta[key], _refuse_node) for key in STORED_META if key in node.meta}
    said |= {key: modules.describe(node.meta[key]) for key in MODULE_STACKS if node.meta.get(key) is not None}
    if "val" in node.meta:
        said["val"] = memory.describe(node.meta["val"])
    if "desc" in node.meta:
        said["desc"] = _descriptors_to_json(node.meta["desc"])
    return said


def _refuse_node(node: fx.Node) -> Any:
    raise NotSerializable(f"a node in metadata: {node}")


def _descriptors_to_json(described: Any) -> Any:
    if described is None:
        return None
    if isinstance(described, (list, tuple)):
        return [_descriptors_to_json(one) for one in described]
    data = descriptor_to_json(described)
    if data is None:
        raise NotSerializable(f"an input or output of an unknown kind: {type(described).__name__}")
    return data


def graph_from_json(data: Mapping[str, Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The inverse of ``graph_to_json``, with fake tensors of ``mode``; raises NotSerializable, KeyError, TypeError or ValueError."""
    graph, nodes, fakes = fx.Graph(), list[fx.Node](), FakeMaker(data["memory"], mode)
    for op, name, target, args, kwargs, meta in data["nodes"]:
        function = operator_of(target) if op == "call_function" else target
        node = graph.create_node(op, function, tuple(from_json(args, nodes)), from_json(kwargs, nodes), name=name)
        node.name = name
        node.meta = {key: from_json(meta[key], nodes) for key in STORED_META if key in meta}
        node.meta |= {key: {name: (path, None) for name, path in meta[key]} for key in MODULE_STACKS if key in meta}
        if "val" in meta:
            node.meta["val"] = fakes.make(meta["val"])
        if "desc" in meta:
            node.meta["desc"] = _descriptors_from_json(meta["desc"])
        nodes.append(node)
    return lazy_graph_module(graph)


def _descriptors_from_json(data: Any) -> Any:
    if data is None:
        return None
    return [_descriptors_from_json(one) for one in data] if isinstance(data, list) else descriptor_from_json(data)
