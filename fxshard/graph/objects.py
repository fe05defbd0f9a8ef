"""Python objects among the arguments and results of a call: flattened into tensors, rebuilt, and changed in place.

An object of a class written in Python (a Hugging Face ``Cache``, a dataclass) is represented by its attributes. ``open_call`` replaces each
such argument by ``Opened``, a pytree node whose leaves are the tensors in it, with names such as ``kwargs['cache'].layers[0].keys``. The
rest of the object's state is part of the tree structure, so that a call with another state is another call.

The results of a call and its changes to the objects it was given form a ``CallResult``, whose new tensors are the program's outputs.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard.errors import OptionError
from fxshard.graph.targets import cached_by_target

COUNTER_LIMIT = 2**31
"""Integers of this size and above are not treated as counters of tokens or calls: they stay constants."""
HEAP_TYPE = 1 << 9
"""The type flag of classes written in Python (Py_TPFLAGS_HEAPTYPE)."""
LISTS, MAPPINGS = (list,), (dict, OrderedDict)
FOREIGN = ("torch", "builtins", "functools", "pybind11_builtins")
"""Packages whose classes have state outside their attributes."""

ValueSpec = tuple[Any, ...]
"""A flattened value: ``("tensor", k)``; ``("value", type, value)``, a constant; ``("held", Opaque)``, an opaque object; ``("node", k)``,
the k-th object, list or dict; ``("tuple", type, parts)``; ``("tree", type, context, parts)``, another pytree; ``("length", k)``, an
integer, carried as the length of tensor k. In an outcome also ``("given", k)``, leaf k of the arguments, and ``("given length", k)``, its
length."""
Counted = frozenset[tuple[type, Any]]
"""Attributes that hold integers changed by calls: (class of the object, attribute name). Such an integer is a leaf of the call
(see ``as_length``), not a constant."""
Step = tuple[str, Any]
"""``("attr", name)`` or ``("item", key)``."""


@dataclass(frozen=True)
class Opaque:
    """An opaque object, compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class ObjectState:
    """An object, list or dict: its class, the names or keys of its parts, and the parts."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[ValueSpec, ...]


@cached_by_target
def is_openable(kind: type) -> bool:
    """Whether the attributes (``__dict__`` or ``__slots__``) of a class's objects are all their state. False for modules, classes and
    enums, which are never flattened."""
    if issubclass(kind, nn.Module | type | enum.Enum | torch.Tensor | BaseException | Opened):
        return False
    line = kind.__mro__[:-1]
    return all(c.__flags__ & HEAP_TYPE and c.__module__.partition(".")[0] not in FOREIGN for c in line) and _has_plain_slots(kind)


def _has_plain_slots(kind: type) -> bool:
    """Whether it has attributes at all, and no slot starts with two underscores: Python mangles such names."""
    slots = slots_of(kind)
    return bool(kind.__dictoffset__ or slots) and not any(name.startswith("__") for name in slots)


@cached_by_target
def slots_of(kind: type) -> tuple[str, ...]:
    """The names in ``__slots__`` of a class and its bases."""
    given = [vars(c).get("__slots__", ()) for c in reversed(kind.__mro__)]
    names = [name for one in given for name in ((one,) if isinstance(one, str) else one)]
    return tuple(name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__"))


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those of its class excluded."""
    slots = slots_of(type(value))
    if not slots:
        return vars(value)
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


@dataclass
class Flattener:
    """Flattens values. ``tensors``: the tensors found, each once; ``reached``: how to reach each of them, (index of the node, steps from
    it); ``nodes``: descriptions of the ``objects`` found. ``known``: parts by id, looked up first (tensors that a call was given).
    ``counted``: integers that are leaves; ``lengths``: their leaf indices, in order, if the call was flattened before."""

    known: Mapping[int, ValueSpec] = field(default_factory=dict)
    counted: Counted = frozenset()
    lengths: Iterator[int] | None = None
    tensors: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    reached: list[tuple[int, tuple[Step, ...]]] = field(default_factory=list)
    nodes: list[ObjectState | None] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    seen: dict[int, ValueSpec] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    """Keeps integers alive that ``seen`` knows by their ``id``, so that the ids are not reused."""

    def part(self, value: Any, path: str, of: int = -1, steps: tuple[Step, ...] = ()) -> ValueSpec:
        kind = type(value)
        if kind in _PLAIN:
            return ("value", kind, value.hex() if kind is float else value)
        if id(value) in self.known:
            return self.known[id(value)]
        if id(value) in self.seen:
            return self.seen[id(value)]
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            found: ValueSpec = ("length" if isinstance(value, torch.SymInt) else "tensor", len(self.tensors))
            self.tensors.append(value)
            self.paths.append(path)
            self.reached.append((of, steps))
            self.seen[id(value)] = found
            return found
        if kind in LISTS or kind in MAPPINGS or is_openable(kind):
            found = ("node", len(self.nodes))
            self.seen[id(value)] = found
            self.objects.append(value)
            self.places.append(path)
            self.nodes.append(None)
            self.nodes[found[1]] = self.node(value, path, found[1], of, steps)
            return found
        return self._fixed(value, path, of, steps)

    def _fixed(self, value: Any, path: str, of: int, steps: tuple[Step, ...]) -> ValueSpec:
        """The part for a tuple, another registered pytree class, or an opaque object."""
        kind = type(value)
        if kind is tuple or pytree.is_namedtuple_instance(value):
            parts = [self.part(v, f"{path}[{i}]", of, (*steps, ("item", i))) for i, v in enumerate(value)]
            return ("tuple", kind, tuple(parts))
        if kind in pytree.SUPPORTED_NODES and pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn is not None:
            children, context = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn(value)
            parts = [self.part(v, path + str(key), of, (*steps, _step(key))) for key, v in children]
            return ("tree", kind, context, tuple(parts))
        if isinstance(value, set | frozenset) and any(isinstance(x, torch.Tensor) for x in value):
            raise OptionError(f"{path or 'an argument'} is a set that holds tensors", remedy="keep tensors in a list: a set has no order")
        return ("held", Opaque(value))

    def node(self, value: Any, path: str, index: int, of: int, steps: tuple[Step, ...]) -> ObjectState:
        """Describes the present state of an object; a tensor in it is reached from node ``of`` by ``steps`` and one more step."""
        kind = type(value)
        if kind in LISTS:
            keys: Any = range(len(value))
            found = [self.part(v, f"{path}[{i}]", of, (*steps, ("item", i))) for i, v in enumerate(value)]
        elif kind in MAPPINGS:
            keys = value
            found = [self.part(v, f"{path}[{k!r}]", of, (*steps, ("item", k))) for k, v in value.items()]
        else:
            keys = state_of(value)
            found = [
                self._length(v, f"{path}.{k}") if (kind, k) in self.counted else self.part(v, f"{path}.{k}", of, (*steps, ("attr", k)))
                for k, v in keys.items()
            ]
        return ObjectState(kind, tuple(keys), tuple(found))

    def _length(self, value: Any, path: str) -> ValueSpec:
        """The part for an integer that is a leaf; a constant if it cannot be a size."""
        if type(value) in _PLAIN and not (type(value) is int and 0 <= value < COUNTER_LIMIT):
            return self.part(value, path)
        if self.lengths is not None:
            self.alive.append(value)
            found = self.seen[id(value)] = ("given length", next(self.lengths))
            return found
        self.tensors.append(as_length(value))
        self.paths.append(path)
        return ("length", len(self.tensors) - 1)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type})


def _step(key: Any) -> Step:
    if isinstance(key, pytree.GetAttrKey):
        return ("attr", key.name)
    return ("item", key.key if isinstance(key, pytree.MappingKey) else key.idx)


def as_length(number: Any) -> torch.Tensor:
    """An empty tensor [number, 0]: it carries an integer into the program as a size."""
    return torch.empty(number, 0, dtype=torch.uint8)


def is_length(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.uint8 and leaf.dim() == 2 and leaf.shape[1] == 0


def length_of(leaf: Any) -> Any:
    """The integer that a tensor carries (see ``as_length``); a number is returned unchanged."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) else leaf


class Opened:
    """An object among the arguments of a call, as a pytree node whose leaves are the tensors in it and the ``counted`` integers."""

    def __init__(self, value: Any, counted: Counted = frozenset()) -> None:
        self.walk = Flattener(counted=counted)
        self.walk.part(value, "")


def _flatten_with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], tuple[ObjectState, ...]]:
    walk = opened.walk
    return [(_Path(path), x) for path, x in zip(walk.paths, walk.tensors, strict=True)], _all(walk.nodes)


def _all(nodes: Sequence[ObjectState | None]) -> tuple[ObjectState, ...]:
    return tuple(node for node in nodes if node is not None)


@dataclass(frozen=True)
class _Path:
    """The pytree key of a tensor in an object: its whole path from the object."""

    text: str

    def __str__(self) -> str:
        return self.text


def _unflatten(tensors: Any, nodes: tuple[ObjectState, ...]) -> Any:
    return Builder(nodes, list(tensors)).objects[0]


pytree.register_pytree_node(
    Opened, lambda opened: (opened.walk.tensors, _all(opened.walk.nodes)), _unflatten, flatten_with_keys_fn=_flatten_with_keys
)


def open_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], counted: Counted = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The arguments with each object replaced by ``Opened``, and all objects, lists and dicts in them, in order.

    Raises OptionError if two arguments share one of them, because a change of it could not be attributed to one argument.
    """
    found: dict[int, Any] = {}

    def opened(value: Any) -> Any:
        if not is_openable(type(value)):
            return value
        one = Opened(value, counted)
        for part in one.walk.objects:
            if id(part) in found:
                what = f"two arguments hold the same {type(part).__name__}"
                raise OptionError(what, remedy="pass it once: the model may change it in place")
            found[id(part)] = part
        return one

    call = pytree.tree_map(opened, (tuple(args), dict(kwargs)), is_leaf=lambda x: is_openable(type(x)) or isinstance(x, Opened))
    return call[0], call[1], list(found.values())


@lru_cache(maxsize=256)
def _leaves_in_objects(spec: Opaque) -> frozenset[int]:
    found: list[bool] = []

    def walk(part: pytree.TreeSpec, inside: bool) -> None:
        if part.is_leaf():
            found.append(inside)
        for child in part.children():
            walk(child, inside or part.type is Opened)

    walk(spec.value, False)
    return frozenset(i for i, one in enumerate(found) if one)


def counted_in(spec: pytree.TreeSpec) -> tuple[Counted, tuple[int, ...]]:
    """(the integers that are leaves of a call of this structure, their leaf indices)."""
    counted: set[tuple[type, Any]] = set()
    places: list[int] = []

    def walk(part: pytree.TreeSpec, first: int) -> None:
        if part.type is Opened:
            found = [(n.kind, key, p[1]) for n in part.context for key, p in zip(n.keys, n.parts, strict=True) if p[0] == "length"]
            counted.update((kind, key) for kind, key, _ in found)
            places.extend(first + k for k in sorted(k for _, _, k in found))
        for child in part.children():
            walk(child, first)
            first += child.num_leaves

    walk(spec, 0)
    return frozenset(counted), tuple(places)


def on_cpu(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The structure of a call with the CPU in place of each ``torch.device`` in its objects, to match CPU fakes."""
    context = tuple(map(_on_cpu, spec.context)) if spec.type is Opened else spec.context
    return spec if spec.is_leaf() else pytree.TreeSpec(spec.type, context, [on_cpu(child) for child in spec.children()])


def _on_cpu(node: ObjectState) -> ObjectState:
    return replace(node, parts=tuple(("value", torch.device, torch.device("cpu")) if p[1] is torch.device else p for p in node.parts))


def leaves_in_objects(spec: pytree.TreeSpec) -> frozenset[int]:
    """The indices of the leaves that are inside objects, for a call of this structure."""
    return _leaves_in_objects(Opaque(spec))


@dataclass
class Builder:
    """Builds the objects that ``nodes`` describe. The first ones are the existing objects ``held``, changed in place; those whose node is
    None stay unchanged.

    ``device``: replaces each ``torch.device`` among the values; None keeps them.
    """

    nodes: Sequence[ObjectState | None]
    tensors: Sequence[Any] = ()
    given: Sequence[Any] = ()
    held: Sequence[Any] = ()
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.objects = [*self.held, *(_new(node.kind) for node in _all(self.nodes[len(self.held) :]))]
        for node, target in zip(self.nodes, self.objects, strict=True):
            if node is not None:
                _fill(target, node, [self.value(part) for part in node.parts])

    def value(self, part: ValueSpec) -> Any:
        what, one = part[0], part[1]
        if what == "tensor":
            return self.tensors[one]
        if what == "given":
            return self.given[one]
        if what == "length":
            return length_of(self.tensors[one])
        if what == "given length":
            return length_of(self.given[one])
        if what == "node":
            return self.objects[one]
        if what == "value" and one is torch.device:
            return self.device or part[2]
        if what == "value":
            return float.fromhex(part[2]) if one is float else part[2]
        if what == "held":
            return one.value
        parts = [self.value(p) for p in part[-1]]
        if what == "tree":
            return pytree.SUPPORTED_NODES[one].unflatten_fn(parts, part[2])
        return tuple(parts) if one is tuple else one(*parts)


def _new(kind: type) -> Any:
    return kind() if kind in LISTS or kind in MAPPINGS else object.__new__(kind)


def _fill(target: Any, node: ObjectState, values: Sequence[Any]) -> None:
    if node.kind in LISTS:
        target[:] = values
        return
    slots = slots_of(node.kind) if node.kind not in MAPPINGS else ()
    for name in slots:
        if hasattr(target, name):
            object.__delattr__(target, name)
    state = target if node.kind in MAPPINGS else getattr(target, "__dict__", {})
    state.clear()
    for key, value in zip(node.keys, values, strict=True):
        if key in slots:
            object.__setattr__(target, key, value)
        else:
            state[key] = value


@dataclass(frozen=True)
class CallResultSpec:
    """The structure of a ``CallResult``: the call's result (``root``) and its objects. The first of ``nodes`` are the objects that the call
    was given, None for one that it did not change; ``before``: the same objects before the call. Tensors are outputs of the program, in
    the order of ``paths``, or leaves of the arguments. ``inside``: outputs that are only inside an object, not in plain containers;
    ``counts``: paths of the integers in objects that the call changes; ``counters``: those of them that are attributes."""

    root: ValueSpec
    nodes: tuple[ObjectState | None, ...]
    before: tuple[ObjectState, ...]
    paths: tuple[str, ...]
    inside: frozenset[int]
    counts: tuple[str, ...] = ()
    counters: Counted = frozenset()

    @property
    def spec(self) -> pytree.TreeSpec:
        """The structure of the program's outputs, which unflattens to a ``CallResult``."""
        return pytree.TreeSpec(CallResult, self, [pytree.treespec_leaf() for _ in self.paths])


@dataclass(frozen=True)
class CallResult:
    """The results of a call and its changes to objects: ``CallResultSpec`` with the values of the outputs."""

    values: Sequence[Any]
    after: CallResultSpec

    def apply(self, objects: Sequence[Any], given: Sequence[Any], device: torch.device | None = None) -> Any:
        """Applies the call's changes to its ``objects``, in place, and returns the model's result. ``given``: leaves of the arguments.

        ``device``: the device of the tensors, for attributes that name it: a trace names the CPU.
        """
        return Builder(self.after.nodes, self.values, given, objects, device).value(self.after.root)

    def on_copies(self, given: Sequence[Any]) -> Any:
        """The model's result, built from new objects: those of the call stay unchanged."""
        return self.apply(Builder(self.after.before, (), given).objects, given)


pytree.register_pytree_node(CallResult, lambda x: (list(x.values), x.after), lambda values, after: CallResult(list(values), after))


def call_result_spec(spec: pytree.TreeSpec) -> CallResultSpec | None:
    """The ``CallResultSpec`` in the structure of a program's outputs, None if they are not a ``CallResult``."""
    return spec.context if spec.type is CallResult else None


def lengths_after(spec: pytree.TreeSpec, leaves: int) -> list[int | None]:
    """For each of the ``leaves`` of a call the integer that it carries after the call; None if it does not change or carries none."""
    found: list[int | None] = [None] * leaves
    after = call_result_spec(spec)
    for old, new in zip(after.before, after.nodes, strict=False) if after is not None else ():
        parts = {} if new is None else dict(zip(new.keys, new.parts, strict=True))
        for key, was in zip(old.keys, old.parts, strict=True):
            if was[0] == "given length" and parts.get(key, ())[:2] == ("value", int):
                found[was[1]] = parts[key][2]
    return found


def outputs_in_objects(spec: pytree.TreeSpec) -> dict[str, str]:
    """The names of a program's outputs that are inside objects -> their paths."""
    after = call_result_spec(spec)
    return {} if after is None else {f"outputs[{i}]": after.paths[i] for i in sorted(after.inside)}
