"""Objects among the arguments and results of a call: taken apart into their tensors, put together again, changed in place.

An object of a class written in Python is its attributes: a Hugging Face ``Cache``, a dataclass. ``open_call`` replaces each among a
call's arguments by ``Opened``, a pytree node whose leaves are the tensors in it, so that everything that flattens arguments sees them, by
names such as ``kwargs['cache'].layers[0].keys``. The rest of its state is the node's structure: with another state it is another call.

What a call returns, and what it leaves in the objects that it was given, is an ``Outcome``: the new tensors among it are the program's
outputs.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard.errors import OptionError

COUNTED = 2**31
"""Numbers from here on are no counts of tokens or calls: they stay values, and what a call computes with them is no size."""
HEAP_TYPE = 1 << 9
"""The flag of classes that are written in Python (Py_TPFLAGS_HEAPTYPE)."""
LISTS, MAPPINGS = (list,), (dict, OrderedDict)
FOREIGN = ("torch", "builtins", "functools", "pybind11_builtins")
"""Packages whose own classes hold more than their attributes."""

Part = tuple[Any, ...]
"""What stands at one place: ``("tensor", k)``, ``("value", type, value)``, ``("held", Same)``, ``("node", k)``, ``("tuple", type, parts)``,
``("tree", type, context, parts)``, ``("length", k)``: the number that tensor k is long; of an outcome also ``("given", k)``, leaf k of the
arguments, and ``("given length", k)``."""
Counted = frozenset[tuple[type, Any]]
"""Numbers that calls change: (class of an object, name of the attribute). Each is among a call's leaves, as ``as_length``, not a value."""
Step = tuple[str, Any]
"""``("attr", name)`` or ``("item", key)``."""


@dataclass(frozen=True)
class Same:
    """Something that is not looked into: equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Node:
    """An object, a list or a dict: its class, the names or keys of its parts, and these."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]


T = TypeVar("T")


def _by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """``function``, asked once for each class."""
    known: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    def ask(kind: type) -> T:
        found = known.get(kind)
        if found is None:
            found = known[kind] = function(kind)
        return found

    return ask


@_by_class
def is_openable(kind: type) -> bool:
    """Whether objects of a class are their attributes, by ``__dict__`` or ``__slots__``; modules, classes and enums are not taken apart."""
    if issubclass(kind, nn.Module | type | enum.Enum | torch.Tensor | BaseException | Opened):
        return False
    line = kind.__mro__[:-1]
    return all(c.__flags__ & HEAP_TYPE and c.__module__.partition(".")[0] not in FOREIGN for c in line) and _has_plain_slots(kind)


def _has_plain_slots(kind: type) -> bool:
    """Whether it has attributes at all, and none with two underscores before its name, which is another name outside of the class."""
    slots = slots_of(kind)
    return bool(kind.__dictoffset__ or slots) and not any(name.startswith("__") for name in slots)


@_by_class
def slots_of(kind: type) -> tuple[str, ...]:
    """The names in ``__slots__`` of a class and of those that it is derived from."""
    given = [vars(c).get("__slots__", ()) for c in reversed(kind.__mro__)]
    names = [name for one in given for name in ((one,) if isinstance(one, str) else one)]
    return tuple(name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__"))


def state_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has of its own."""
    slots = slots_of(type(value))
    if not slots:
        return vars(value)
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


@dataclass
class Walk:
    """Takes values apart. ``tensors`` are those met, each once, ``reached`` how: (of which node, by which steps); ``nodes`` describes
    the ``objects``. ``known``: what is met is looked up there first (tensors that a call was given). ``counted``: numbers that are
    leaves; ``lengths``: which leaves of the call they are, in order, where it was taken apart before."""

    known: Mapping[int, Part] = field(default_factory=dict)
    counted: Counted = frozenset()
    lengths: Iterator[int] | None = None
    tensors: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    reached: list[tuple[int, tuple[Step, ...]]] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    seen: dict[int, Part] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    """Numbers that are known by their ``id``, which another may have once they are gone."""

    def part(self, value: Any, path: str, of: int = -1, steps: tuple[Step, ...] = ()) -> Part:
        kind = type(value)
        if kind in _PLAIN:
            return ("value", kind, value.hex() if kind is float else value)
        if id(value) in self.known:
            return self.known[id(value)]
        if id(value) in self.seen:
            return self.seen[id(value)]
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            found: Part = ("length" if isinstance(value, torch.SymInt) else "tensor", len(self.tensors))
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

    def _fixed(self, value: Any, path: str, of: int, steps: tuple[Step, ...]) -> Part:
        """A tuple, a registered node of another class, or what is not looked into."""
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
        return ("held", Same(value))

    def node(self, value: Any, path: str, index: int, of: int, steps: tuple[Step, ...]) -> Node:
        """An object as it is now; a tensor in it is reached from ``of`` by ``steps`` and one more."""
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
        return Node(kind, tuple(keys), tuple(found))

    def _length(self, value: Any, path: str) -> Part:
        """A number that is a leaf of its own; what is no number of a size is a value."""
        if type(value) in _PLAIN and not (type(value) is int and 0 <= value < COUNTED):
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
    """A tensor without elements that is so long: a number of which programs make a size like any other."""
    return torch.empty(number, 0, dtype=torch.uint8)


def is_length(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.uint8 and leaf.dim() == 2 and leaf.shape[1] == 0


def length_of(leaf: Any) -> Any:
    """The number that a tensor stands for; a number stands for itself."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) else leaf


class Opened:
    """An object among the arguments of a call, as a pytree node: its leaves are the tensors in it, and the numbers ``counted``."""

    def __init__(self, value: Any, counted: Counted = frozenset()) -> None:
        self.walk = Walk(counted=counted)
        self.walk.part(value, "")


def _flatten(opened: Opened) -> tuple[list[Any], tuple[Node, ...]]:
    return opened.walk.tensors, _all(opened.walk.nodes)


def _flatten_with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], tuple[Node, ...]]:
    walk = opened.walk
    return [(_Path(path), x) for path, x in zip(walk.paths, walk.tensors, strict=True)], _all(walk.nodes)


def _all(nodes: Sequence[Node | None]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if node is not None)


@dataclass(frozen=True)
class _Path:
    """The key of a tensor in an object: its whole path there."""

    text: str

    def __str__(self) -> str:
        return self.text


def _unflatten(tensors: Any, nodes: tuple[Node, ...]) -> Any:
    return Builder(nodes, list(tensors)).objects[0]


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def open_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], counted: Counted = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The arguments with each object in them as ``Opened``, and all objects, lists and dicts that are in these, in order.

    Raises OptionError where two of them share one: they could not be told apart when one is changed.
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
def _leaves_in_objects(spec: Same) -> frozenset[int]:
    found: list[bool] = []

    def walk(part: pytree.TreeSpec, inside: bool) -> None:
        if part.is_leaf():
            found.append(inside)
        for child in part.children():
            walk(child, inside or part.type is Opened)

    walk(spec.value, False)
    return frozenset(i for i, one in enumerate(found) if one)


def counted_in(spec: pytree.TreeSpec) -> tuple[Counted, tuple[int, ...]]:
    """(the numbers that are leaves of a call of this structure, which leaves these are)."""
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
    """The structure of a call whose objects say that they are on the CPU, as its fakes are."""
    context = tuple(map(_on_cpu, spec.context)) if spec.type is Opened else spec.context
    return spec if spec.is_leaf() else pytree.TreeSpec(spec.type, context, [on_cpu(child) for child in spec.children()])


def _on_cpu(node: Node) -> Node:
    return replace(node, parts=tuple(("value", torch.device, torch.device("cpu")) if p[1] is torch.device else p for p in node.parts))


def leaves_in_objects(spec: pytree.TreeSpec) -> frozenset[int]:
    """Which leaves of a call of this structure stand in objects."""
    return _leaves_in_objects(Same(spec))


@dataclass
class Builder:
    """Puts together what ``nodes`` describe. The first objects are those ``held``, changed in place where there is a node for them.

    ``device``: what every ``torch.device`` among the values becomes, None where it stays.
    """

    nodes: Sequence[Node | None]
    tensors: Sequence[Any] = ()
    given: Sequence[Any] = ()
    held: Sequence[Any] = ()
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.objects = [*self.held, *(_new(node.kind) for node in _all(self.nodes[len(self.held) :]))]
        for node, target in zip(self.nodes, self.objects, strict=True):
            if node is not None:
                _fill(target, node, [self.value(part) for part in node.parts])

    def value(self, part: Part) -> Any:
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


def _fill(target: Any, node: Node, values: Sequence[Any]) -> None:
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
class After:
    """What a call leaves: what it returns (``root``), and its objects. The first of ``nodes`` are those that it was given, None where
    nothing changed in one; ``before`` has those as they were. Tensors are the program's outputs, in the order of ``paths``, or leaves of
    the arguments; ``inside``: which outputs stand in an object, not beside others in tuples and the like; ``counts``: paths of the
    numbers in objects that the call changes, ``counters`` what they are."""

    root: Part
    nodes: tuple[Node | None, ...]
    before: tuple[Node, ...]
    paths: tuple[str, ...]
    inside: frozenset[int]
    counts: tuple[str, ...] = ()
    counters: Counted = frozenset()

    @property
    def spec(self) -> pytree.TreeSpec:
        """The structure of the program's outputs, which unflattens to an ``Outcome``."""
        return pytree.TreeSpec(Outcome, self, [pytree.treespec_leaf() for _ in self.paths])


@dataclass(frozen=True)
class Outcome:
    """``After`` with the outputs' values."""

    values: Sequence[Any]
    after: After

    def settle(self, objects: Sequence[Any], given: Sequence[Any], device: torch.device | None = None) -> Any:
        """Changes the ``objects`` of the call whose leaves are ``given``, in place, and returns what the model returns.

        ``device``: where tensors are, for attributes that say so: a trace is on the CPU.
        """
        return Builder(self.after.nodes, self.values, given, objects, device).value(self.after.root)

    def apart(self, given: Sequence[Any]) -> Any:
        """What the model returns, of objects of its own: those of the call stay as they are."""
        return self.settle(Builder(self.after.before, (), given).objects, given)


pytree.register_pytree_node(Outcome, lambda x: (list(x.values), x.after), lambda values, after: Outcome(list(values), after))


def after_of(spec: pytree.TreeSpec) -> After | None:
    """What ``After`` is in the structure of a program's outputs, if they are such."""
    return spec.context if spec.type is Outcome else None


def lengths_after(spec: pytree.TreeSpec, leaves: int) -> list[int | None]:
    """For each leaf of a call what the number that it stands for is after the call; None where it stays, or is no number."""
    found: list[int | None] = [None] * leaves
    after = after_of(spec)
    for old, new in zip(after.before, after.nodes, strict=False) if after is not None else ():
        parts = {} if new is None else dict(zip(new.keys, new.parts, strict=True))
        for key, was in zip(old.keys, old.parts, strict=True):
            if was[0] == "given length" and parts.get(key, ())[:2] == ("value", int):
                found[was[1]] = parts[key][2]
    return found


def outputs_in_objects(spec: pytree.TreeSpec) -> dict[str, str]:
    """The names of a program's outputs that stand in objects -> their paths."""
    after = after_of(spec)
    return {} if after is None else {f"outputs[{i}]": after.paths[i] for i in sorted(after.inside)}
