"""The graph that is planned: aten on global shapes, neutral to the device, its ends known by name."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxshard._torch_compat import pytree
from fxshard._torch_compat.nodes import inputs_of
from fxshard._torch_compat.symbols import are_numbers, hint_of, is_symbolic, is_unknown
from fxshard.graph.side_effects import Attribute, SideEffects
from fxshard.graph.targets import kept, name_of
from fxshard.shapes import GraphFamily

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_PASSES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "passes", "")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
INPUT_KINDS = ("parameter", "buffer", "input", "tangent", "seed")
OUTPUT_KINDS = ("output", "gradient", "mutation")
FREE = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.t.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
    "aten.expand.default",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.alias.default",
    "aten.detach.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "fxshard.to_local.default",
    "fxshard.from_local.default",
}
"""Operators that only relabel memory."""
RELABELS = FREE | {"aten._to_copy.default", "prims.convert_element_type.default"}
"""Operators that give a tensor in another form: what they make of a parameter is as good as the parameter."""


@dataclass(frozen=True)
class GraphInput:
    """A placeholder: its node, what it is, and the user's name for it (a parameter's FQN, ``args[0]``, ``kwargs['x']``)."""

    node: str
    kind: str
    name: str


@dataclass(frozen=True)
class GraphOutput:
    """One entry of the output node: what it is and of what (the output's path, the parameter's or input's name)."""

    kind: str
    name: str

    @property
    def tangent(self) -> str | None:
        """The name of the tangent that belongs to it, if it is a differentiable output: ``tangents[0]`` for ``outputs[0]``."""
        return self.name.replace("outputs", "tangents", 1) if self.kind == "output" else None


Calls = tuple[tuple[str | None, ...], ...]
"""For each call of a module, in order, the nodes of the tensors that it returned; None for one that nothing reads."""


@dataclass(frozen=True)
class Watched:
    """A call of a hook: of which module, which hook (by its key in the module's table), and why it is in no graph, "" where it is."""

    module: str
    key: int
    opaque: str = ""


@dataclass(frozen=True)
class TappedCall:
    """A call of a module with backward hooks: which input of the graph (``taps[i]``) has the gradient of each of its positional arguments,
    and of each of its results; None for what has no gradient. ``begins``, ``ends``: its places among all their beginnings and ends."""

    module: str
    given: tuple[int | None, ...]
    out: tuple[int | None, ...]
    begins: int
    ends: int


@dataclass(frozen=True)
class PlanningGraph:
    """A traced model.

    ``module``: one flat aten graph; placeholders in the order of ``inputs``, its output a flat tuple in the order of
    ``outputs``; every tensor node has a fake CPU tensor of its global shape in ``meta["val"]``.
    ``aliases``: further names of tied parameters -> the name that the graph uses. ``constants``: arguments that are no
    tensors, by path (see ``constants_of``). ``returned``: what each submodule returns, by its name.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    train: bool
    aliases: dict[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    returned: Mapping[str, Calls] = field(default_factory=dict)
    unreduced: frozenset[str] = frozenset()
    """Values in which no pending sum may be taken: forms of gradients in a dtype in which the user wants none to be added up."""
    watched: tuple[Watched, ...] | None = None
    """Calls of hooks whose arguments are outputs behind the model's own, in order; None where outputs are the model's alone."""
    tapped: tuple[TappedCall, ...] = ()
    """Calls of modules with backward hooks, in order; their taps are inputs behind the model's own."""
    side_effects: SideEffects | None = None
    """What a call leaves in attributes of modules; tensors there are outputs behind the model's own, and what hooks are called with."""
    fixed: frozenset[Attribute] = frozenset()
    """Attributes that are tensors, but no buffers, and whose values are in the graph."""
    family: GraphFamily | None = None
    """The graph for all sizes of its dynamic dims, where it has any; ``module`` is it at the example's."""

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.module.graph.nodes)

    @cached_property
    def by_name(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def lines(self) -> dict[str, str]:
        """The user's source line behind each node that has one."""
        return {n.name: line for n in self.nodes if (line := source_line(n)) is not None}

    @cached_property
    def late(self) -> dict[str, str]:
        """What about calls only running tells (``run_time_cause``), by the node's name, where there is something."""
        return {n.name: cause for n in planned_nodes(self) if n.op == "call_function" and (cause := run_time_cause(n))}

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What was worked out of the graph alone, and is asked again, by name: ``call.calls_of``."""
        return {}

    def inputs_of(self, kind: str) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.kind == kind)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of operators, arguments, shapes, dtypes and the names of the ends; no source lines, no devices."""
        ends = [(i.kind, i.name) for i in self.inputs], [(o.kind, o.name) for o in self.outputs]
        marks: list[Any] = [sorted(self.unreduced)] if self.unreduced else []
        if self.family is not None:
            marks += [[str(dim), dim.name, dim.least, dim.most or 0, dim.uneven] for dim in self.family.dims]
            marks += sorted({guard.condition for guard in self.family.guards})
        text = json.dumps([[_describe(n) for n in self.nodes], *ends, *marks], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Fixed:
    """In the structure of outputs: a value that is no tensor (None, a number), the same at each call."""

    value: Any


@dataclass(frozen=True)
class Number:
    """In the structure of outputs: a number that a program computes as a tensor of no dims, and the model returns as a number."""

    value: Any


def _as_number(children: Any, _: Any) -> Any:
    (value,) = children
    return value.item() if isinstance(value, torch.Tensor) else value


pytree.register_pytree_node(Fixed, lambda x: ([], x.value), lambda _, value: value)
pytree.register_pytree_node(Number, lambda x: ([x.value], None), _as_number)


def constants_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments that are no tensors by path (``args[1]``): numbers, texts and None as they are, others as text about them."""
    paths = pytree.tree_flatten_with_path((tuple(args), dict(kwargs or {})))[0]
    return {
        ("args" if path[0].idx == 0 else "kwargs") + pytree.keystr(path[1:]): _constant(value)
        for path, value in paths
        if not isinstance(value, torch.Tensor)
    }


def _constant(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = type(value)
    return str(value) if kind.__module__ == "torch" else f"<{kind.__module__}.{kind.__qualname__}>"


def with_fixed(spec: pytree.TreeSpec, fixed: Mapping[int, Any], numbers: Collection[int] = ()) -> pytree.TreeSpec:
    """``spec`` whose leaves at the places in ``fixed`` are no leaves any more: unflattening puts their values there.

    Those at the places in ``numbers`` stay leaves: unflattening makes numbers of their tensors.
    """
    count = itertools.count()

    def walk(part: pytree.TreeSpec) -> pytree.TreeSpec:
        if not part.is_leaf():
            return pytree.TreeSpec(part.type, part.context, [walk(child) for child in part.children()])
        place = next(count)
        if place in numbers:
            return pytree.TreeSpec(Number, None, [part])
        return pytree.TreeSpec(Fixed, fixed[place], []) if place in fixed else part

    return walk(spec) if fixed or numbers else spec


UNKNOWN = -1
"""Stands in a shape for a size that only running tells: how many elements are not zero, how many are unique."""


def plain_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers, UNKNOWN for those that only running tells."""
    sizes = tuple(shape)
    if are_numbers(sizes):
        return sizes
    return tuple(size if isinstance(size, int) else UNKNOWN if is_unknown(size) else size for size in sizes)


def example_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers, those that are symbols as in the example."""
    return tuple(hint_of(size) if is_symbolic(size) else size for size in shape)


def shape_and_itemsize(node: fx.Node) -> tuple[tuple[int, ...], int]:
    """Sizes (UNKNOWN where only running tells) and bytes of an element of the tensor that a node gives."""
    value = node.meta["val"]
    return plain_shape(value.shape), value.dtype.itemsize


def _by_places(node: fx.Node, read: Sequence[Any]) -> bool:
    """Whether it takes elements at places that are given as numbers, so that only their count matters; a mask tells by its values."""
    masks = (torch.bool, torch.uint8)
    return node.target is torch.ops.aten.index.Tensor and not any(isinstance(t, torch.Tensor) and t.dtype in masks for t in read[1:])


def at_run_time(node: fx.Node) -> bool:
    """Whether ``node`` reads or gives a size or a number that only running tells, or a sparse tensor: it is replicated then."""
    return bool(run_time_cause(node))


def run_time_cause(node: fx.Node) -> str:
    """What about ``node`` only running tells, in words; empty where nothing is."""
    read = [n.meta.get("val") for n in node.all_input_nodes if n.op != "output"]
    by_values = _gives_any_shape(node.target) and not _by_places(node, read)
    if not by_values and all(map(_is_known, read)) and _is_known(node.meta.get("val")):
        return ""
    given, taken = pytree.tree_leaves(node.meta.get("val")), pytree.tree_leaves(read)
    if any(isinstance(v, torch.Tensor) and v.layout != torch.strided for v in (*given, *taken)):
        return "it reads or gives a sparse tensor"
    if any(map(_has_unknown_size, taken)):
        return "it reads a tensor whose size only running tells"
    if by_values or any(map(_has_unknown_size, given)):
        return "it gives a tensor whose size only running tells"
    return "it reads or gives a number that only running tells" if any(map(is_unknown, (*given, *taken))) else ""


@kept
def _gives_any_shape(target: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(target, "tags", ())


def _is_known(value: Any) -> bool:
    """Whether it is a tensor whose sizes are numbers, or several: as nearly all are, which is asked first."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and are_numbers(value.shape)
    return isinstance(value, (tuple, list)) and all(map(_is_known, value))


def _has_unknown_size(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and UNKNOWN in plain_shape(value.shape)


def _describe(node: fx.Node) -> list[Any]:
    args = _written(node.args), _written(node.kwargs)
    metas = [(list(plain_shape(v.shape)), str(v.dtype)) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return [node.name, node.op, name_of(node.target), repr(args), metas]


def _written(value: Any) -> Any:
    """An argument with all in it as text; pytree, which takes long, is asked of what is not among the usual."""
    kind = type(value)
    if kind is fx.Node:
        return f"%{value.name}"
    if kind is tuple:
        return tuple(map(_written, value))
    if kind is immutable_list:
        return list(map(_written, value))
    if kind is immutable_dict:
        return {key: _written(item) for key, item in value.items()}
    return _plain(value) if kind in (int, float, bool, str, type(None)) else pytree.tree_map(_leaf, value)


def _leaf(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, fx.Node) else _plain(value)


def _plain(value: Any) -> str:
    return "device" if isinstance(value, torch.device) else repr(value)


def is_getitem(node: fx.Node) -> bool:
    """Whether ``node`` only picks one output of its producer."""
    return node.target is operator.getitem and node.op == "call_function"


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors that ``node`` reads, in order of occurrence in its args and kwargs, repeats included."""
    if is_getitem(node):
        return ()
    found: list[fx.Node] = []
    for value in node.args:
        if type(value) is fx.Node:  # as most are
            if isinstance(value.meta.get("val"), torch.Tensor):
                found.append(value)
        elif type(value) not in _PLAIN:
            _collect(value, found)
    if node.kwargs:
        _collect(node.kwargs, found)
    return tuple(found)


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})
"""Types of most arguments that hold no node."""


def _collect(value: Any, found: list[fx.Node]) -> None:
    """Appends the tensors in an argument in the order of pytree's leaves; asked of each node many times, so without pytree."""
    if isinstance(value, fx.Node):
        if is_tensor(value):
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def is_number(node: fx.Node) -> bool:
    """Whether the value is a number that symbols stand for."""
    return is_symbolic(node.meta.get("val"))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def outputs_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The fake tensors that ``node`` produces, one an output; None for outputs that are not tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in value)
    return ()


def producer(node: fx.Node) -> tuple[fx.Node, int]:
    """(node with an OpSpec, output index) behind ``node``: getitems are looked through."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def planned_nodes(graph: PlanningGraph) -> list[fx.Node]:
    """The nodes that carry an OpSpec: placeholders, calls and the output; getitems follow their producer."""
    return [n for n in graph.nodes if not is_getitem(n)]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(inputs_of(node))
    return found


def of_user(path: str) -> bool:
    """Whether a file is a model's own: neither torch's nor Python's, nor what tracing puts in the place of a call."""
    return not path.startswith((_TORCH, _PASSES, "<")) and (not path.startswith(_PYTHON) or "site-packages" in path)


def source_line(node: fx.Node) -> str | None:
    """``file:line, code`` of the user's line behind ``node``, None where tracing kept none."""
    trace = node.meta.get("stack_trace")
    return _users_line(trace) if trace else None


def users_place(trace: str) -> str | None:
    """``file:line`` of the user's innermost line in the text of a stack trace, None where there is none."""
    line = _users_line(trace)
    return None if line is None else ":".join(line.split(":")[:2])


@lru_cache(maxsize=4096)
def _users_line(trace: str) -> str | None:
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip() and not set(line.strip()) <= set("^~ ")]
    places = [i for i, line in enumerate(lines) if line.startswith('File "') and of_user(line.split('"')[1])]
    if not places:
        return None
    parts = lines[places[-1]].split('"')
    number = parts[2].split("line ")[-1].split(",")[0]
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ""
    return f"{parts[1]}:{number}: {code}"
