"""The planning graph: aten on global shapes, independent of the device, with named inputs and outputs."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxshard._torch_compat import pytree
from fxshard._torch_compat.nodes import inputs_of
from fxshard._torch_compat.sizes.symbols import are_numbers, hint_of, is_symbolic, is_unknown
from fxshard.graph.side_effects import Attribute, SideEffects
from fxshard.graph.targets import cached_by_target, name_of
from fxshard.shapes import GraphFamily
from fxshard.shapes.arguments import path_name

T = TypeVar("T")

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_PASSES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "passes", "")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
INPUT_KINDS = ("parameter", "buffer", "input", "tangent", "seed")
OUTPUT_KINDS = ("output", "gradient", "mutation")
VIEWS = {
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
    "fxshard.placed.default",
}
"""Operators whose result shares the memory of their operand."""
RELABELS = VIEWS | {"aten._to_copy.default", "prims.convert_element_type.default"}
"""Operators that only change a tensor's view or dtype: their result for a parameter can be treated as the parameter."""


@dataclass(frozen=True)
class GraphInput:
    """A placeholder: its node, its kind (of ``INPUT_KINDS``), and the user's name for it (a parameter's FQN, ``args[0]``,
    ``kwargs['x']``)."""

    node: str
    kind: str
    name: str


@dataclass(frozen=True)
class GraphOutput:
    """One entry of the output node: its kind (of ``OUTPUT_KINDS``) and its name (the output's path, the parameter's or input's name).
    ``follows``: of a gradient, the names of the tangents that it depends on; None: all."""

    kind: str
    name: str
    follows: tuple[str, ...] | None = None

    @property
    def tangent(self) -> str | None:
        """The name of an output's tangent, ``tangents[0]`` for ``outputs[0]``; None for gradients and mutations."""
        return self.name.replace("outputs", "tangents", 1) if self.kind == "output" else None


@dataclass(frozen=True)
class OutputForm:
    """How the model hands an output out if not whole: as a DTensor (``kind`` "dtensor") or as the rank's shard of one ("local").
    ``placements``: the layout that the model names, by axis; None if it names none."""

    kind: str
    placements: Mapping[str, Placement] | None = None


Calls = tuple[tuple[str | None, ...], ...]
"""For each call of a module, in order, the nodes of the tensors that it returned; None for a tensor that nothing reads."""


@dataclass(frozen=True)
class Watched:
    """A call of a hook: its module, its key in the module's table of hooks, and why it could not be traced, "" if it was."""

    module: str
    key: int
    opaque: str = ""


@dataclass(frozen=True)
class TappedCall:
    """A call of a module with backward hooks. Its taps are graph inputs ``taps[i]`` of zeros, each added to a tensor, whose gradient it
    thereby gets. ``given``, ``out``: the index i of the tap of each positional argument and each result, None if it has none. ``begins``,
    ``ends``: when the call begins and ends, counted over the beginnings and ends of all such calls."""

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
    ``aliases``: further names of tied parameters -> the name that the graph uses. ``constants``: arguments that are not
    tensors, by path (see ``constants_of``). ``returned``: the values that each submodule returns, by its name. ``model``: the name of the
    model's class, "" if unknown.
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
    """Values whose pending sums must not be reduced: gradients in a dtype other than the one the user wants to reduce in."""
    watched: tuple[Watched, ...] | None = None
    """Hook calls, in order, whose arguments follow the model's own outputs; None if the graph returns the model's outputs only."""
    tapped: tuple[TappedCall, ...] = ()
    """Calls of modules with backward hooks, in order; their taps are inputs that follow the model's own."""
    side_effects: SideEffects | None = None
    """Attributes of modules that a call changes; their tensors are outputs that follow the model's own and the hooks' arguments."""
    fixed: frozenset[Attribute] = frozenset()
    """Attributes that are tensors but not buffers, whose values are constants in the graph."""
    forms: Mapping[str, OutputForm] = field(default_factory=dict)
    """The outputs that the model itself hands out as DTensors or shards, by name."""
    family: GraphFamily | None = None
    """The graph for all sizes of its dynamic dims, None if it has none; ``module`` is its instance at the example's sizes."""
    model: str = ""

    def with_family(self, module: fx.GraphModule) -> PlanningGraph:
        """The same graph with ``module``, for all sizes of the dynamic dims if it has such dims."""
        if self.family is None:
            return replace(self, module=module)
        family = replace(self.family, module=module)
        return replace(self, module=family.at(family.example), family=family)

    def for_shards(self, *, uneven: bool) -> PlanningGraph:
        """The same graph for shards of unequal lengths, or of equal ones only; it has another hash if it has dynamic dims."""
        if self.family is None:
            return self
        dims = tuple(replace(dim, uneven=uneven) for dim in self.family.dims)
        return replace(self, family=replace(self.family, dims=dims))

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
    def places(self) -> dict[str, tuple[str, bool]]:
        """(innermost module, whether its backward made the node) of each node for which they are known."""
        return {n.name: place for n in self.nodes if (place := place_of(n)) is not None}

    @cached_property
    def run_time_causes(self) -> dict[str, str]:
        """For calls that depend on values known only at run time: the reason (``run_time_cause``), by node name."""
        return {n.name: cause for n in planned_nodes(self) if n.op == "call_function" and (cause := run_time_cause(n))}

    @cached_property
    def cache(self) -> dict[str, Any]:
        """A cache of results that depend on the graph alone, such as those of ``call.calls_of``."""
        return {}

    def inputs_of(self, kind: str) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.kind == kind)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of operators, arguments, shapes, dtypes and the names of inputs and outputs; source lines and devices do not count."""
        ends = [(i.kind, i.name) for i in self.inputs], [(o.kind, o.name) for o in self.outputs]
        marks: list[Any] = [sorted(self.unreduced)] if self.unreduced else []
        marks += [[name, form.kind, str(form.placements)] for name, form in sorted(self.forms.items())]
        if self.family is not None:
            marks += [[str(dim), dim.name, dim.least, dim.most or 0, dim.uneven] for dim in self.family.dims]
            marks += sorted({guard.condition for guard in self.family.guards})
        text = json.dumps([[_describe(n) for n in self.nodes], *ends, *marks], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Fixed:
    """In the structure of outputs: a value that is not a tensor (None, a number) and is the same in every call."""

    value: Any


@dataclass(frozen=True)
class Number:
    """In the structure of outputs: a number that the program computes as a 0-dim tensor and the model returns as a Python number."""

    value: Any


def _as_number(children: Any, _: Any) -> Any:
    (value,) = children
    return value.item() if isinstance(value, torch.Tensor) else value


pytree.register_pytree_node(Fixed, lambda x: ([], x.value), lambda _, value: value)
pytree.register_pytree_node(Number, lambda x: ([x.value], None), _as_number)


def constants_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments that are not tensors, by path (``args[1]``): numbers, strings and None unchanged, others as a description."""
    paths = pytree.tree_flatten_with_path((tuple(args), dict(kwargs or {})))[0]
    return {path_name(path): _constant(value) for path, value in paths if not isinstance(value, torch.Tensor)}


def _constant(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = type(value)
    return str(value) if kind.__module__ == "torch" else f"<{kind.__module__}.{kind.__qualname__}>"


def with_fixed(spec: pytree.TreeSpec, fixed: Mapping[int, Any], numbers: Collection[int] = ()) -> pytree.TreeSpec:
    """``spec`` without the leaves whose indices are in ``fixed``: unflattening inserts the values given there.

    The leaves at the indices ``numbers`` remain: unflattening turns their tensors into Python numbers.
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
"""In a shape: a size known only at run time, such as the number of nonzero or of unique elements."""


def plain_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers, UNKNOWN for those known only at run time."""
    sizes = tuple(shape)
    if are_numbers(sizes):
        return sizes
    return tuple(size if isinstance(size, int) else UNKNOWN if is_unknown(size) else size for size in sizes)


def example_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers, with the example's value for each symbol."""
    return tuple(hint_of(size) if is_symbolic(size) else size for size in shape)


def shape_and_itemsize(node: fx.Node) -> tuple[tuple[int, ...], int]:
    """Sizes (UNKNOWN if known only at run time) and bytes per element of a node's tensor."""
    value = node.meta["val"]
    return plain_shape(value.shape), value.dtype.itemsize


def _indexes_by_integers(node: fx.Node, read: Sequence[Any]) -> bool:
    """Whether it indexes by integers, so that the result's size depends on their count only; that of a mask depends on its values."""
    masks = (torch.bool, torch.uint8)
    return node.target is torch.ops.aten.index.Tensor and not any(isinstance(t, torch.Tensor) and t.dtype in masks for t in read[1:])


def depends_on_run_time(node: fx.Node) -> bool:
    """Whether ``node`` reads or returns a size or number known only at run time, or a sparse tensor. Such nodes are replicated."""
    return bool(run_time_cause(node))


def run_time_cause(node: fx.Node) -> str:
    """Why ``node`` depends on values known only at run time, in words; empty if it does not."""
    read = [n.meta.get("val") for n in node.all_input_nodes if n.op != "output"]
    by_values = _has_dynamic_shape(node.target) and not _indexes_by_integers(node, read)
    if not by_values and all(map(_is_known, read)) and _is_known(node.meta.get("val")):
        return ""
    given, taken = pytree.tree_leaves(node.meta.get("val")), pytree.tree_leaves(read)
    if any(isinstance(v, torch.Tensor) and v.layout != torch.strided for v in (*given, *taken)):
        return "it reads or returns a sparse tensor"
    if any(map(_has_unknown_size, taken)):
        return "it reads a tensor whose size is known only at run time"
    if by_values or any(map(_has_unknown_size, given)):
        return "it returns a tensor whose size is known only at run time"
    return "it reads or returns a number known only at run time" if any(map(is_unknown, (*given, *taken))) else ""


@cached_by_target
def _has_dynamic_shape(target: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(target, "tags", ())


def _is_known(value: Any) -> bool:
    """Whether it is a tensor, or a tuple of tensors, with numbers as sizes. Nearly all are, so this cheap check comes first."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and are_numbers(value.shape)
    return isinstance(value, (tuple, list)) and all(map(_is_known, value))


def _has_unknown_size(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and UNKNOWN in plain_shape(value.shape)


def _describe(node: fx.Node) -> list[Any]:
    args = _as_text(node.args), _as_text(node.kwargs)
    metas = [(list(plain_shape(v.shape)), str(v.dtype)) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return [node.name, node.op, name_of(node.target), repr(args), metas]


def _as_text(value: Any) -> Any:
    """An argument with all its leaves as text; slow pytree handles only uncommon types."""
    kind = type(value)
    if kind is fx.Node:
        return f"%{value.name}"
    if kind is tuple:
        return tuple(map(_as_text, value))
    if kind is immutable_list:
        return list(map(_as_text, value))
    if kind is immutable_dict:
        return {key: _as_text(item) for key, item in value.items()}
    return _plain(value) if kind in (int, float, bool, str, type(None)) else pytree.tree_map(_leaf, value)


def _leaf(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, fx.Node) else _plain(value)


def _plain(value: Any) -> str:
    return "device" if isinstance(value, torch.device) else repr(value)


def is_getitem(node: fx.Node) -> bool:
    """Whether ``node`` only selects one output of its producer."""
    return node.target is operator.getitem and node.op == "call_function"


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors that ``node`` reads, in order of occurrence in its args and kwargs, repeats included."""
    if is_getitem(node):
        return ()
    found: list[fx.Node] = []
    for value in node.args:
        if type(value) is fx.Node:  # the common case
            if isinstance(value.meta.get("val"), torch.Tensor):
                found.append(value)
        elif type(value) not in _PLAIN:
            _collect(value, found)
    if node.kwargs:
        _collect(node.kwargs, found)
    return tuple(found)


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})
"""Types of most arguments that contain no node."""


def _collect(value: Any, found: list[fx.Node]) -> None:
    """Appends the tensors in an argument in the order of pytree's leaves; avoids pytree because it runs many times per node."""
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
    """Whether the node's value is a symbolic number."""
    return is_symbolic(node.meta.get("val"))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def outputs_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The fake tensors that ``node`` produces, one per output; None for outputs that are not tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in value)
    return ()


def producer(node: fx.Node) -> tuple[fx.Node, int]:
    """(node with an OpSpec, output index) of the value ``node``: for a getitem, its producer and index."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def planned_nodes(graph: PlanningGraph) -> list[fx.Node]:
    """The nodes that carry an OpSpec: placeholders, calls and the output; getitems follow their producer."""
    return [n for n in graph.nodes if not is_getitem(n)]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all nodes that they are computed from."""
    return reached(nodes, inputs_of)


def reached(starts: Iterable[T], further: Callable[[T], Iterable[T]]) -> set[T]:
    """``starts``, and all to which ``further`` leads from them in any number of steps."""
    found: set[T] = set()
    to_do = list(starts)
    while to_do:
        one = to_do.pop()
        if one not in found:
            found.add(one)
            to_do.extend(further(one))
    return found


def is_user_file(path: str) -> bool:
    """Whether a file is the user's: not torch's, not Python's, and not fxshard's replacements for torch functions."""
    return not path.startswith((_TORCH, _PASSES, "<")) and (not path.startswith(_PYTHON) or "site-packages" in path)


def source_line(node: fx.Node) -> str | None:
    """``file:line: code`` of the user's line behind ``node``, None if tracing kept none."""
    trace = node.meta.get("stack_trace")
    return _user_line(trace) if trace else None


def user_location(trace: str) -> str | None:
    """``file:line`` of the user's innermost line in the text of a stack trace, None if there is none."""
    line = _user_line(trace)
    return None if line is None else ":".join(line.split(":")[:2])


@lru_cache(maxsize=4096)
def _user_line(trace: str) -> str | None:
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip() and not set(line.strip()) <= set("^~ ")]
    places = [i for i, line in enumerate(lines) if line.startswith('File "') and is_user_file(line.split('"')[1])]
    if not places:
        return None
    parts = lines[places[-1]].split('"')
    number = parts[2].split("line ")[-1].split(",")[0]
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ""
    return f"{parts[1]}:{number}: {code}"


def place_of(node: fx.Node) -> tuple[str, bool] | None:
    """(name of the innermost module, whether its backward made the node); None if unknown."""
    source = producer(node)[0]
    forward, backward = source.meta.get("nn_module_stack"), source.meta.get("fwd_nn_module_stack")
    paths = [path for path, _ in (forward or backward or {}).values()]
    return (_ROOT.sub("", paths[-1].partition("@")[0]), not forward) if paths else None


_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
"""What Dynamo calls the model itself in the paths of modules."""
