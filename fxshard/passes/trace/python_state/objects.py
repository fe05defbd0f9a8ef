"""Models that take or return objects (``fxshard.graph.objects``): finds how a call changes them, and captures a module on tensors only.

The model first runs as Python on fakes, to find the tensors that it returns, those that it stores in its arguments, and all other
changes to these. The captured module then fills objects like the caller's with its inputs, calls the model, and returns those tensors in
one tuple.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch_compat import capture_dynamo_graph, pytree
from fxshard._torch_compat.dynamo.capture import captured_out_spec
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import FxshardError, TraceError
from fxshard.graph.objects import (
    LISTS,
    MAPPINGS,
    CallResultSpec,
    Flattener,
    ObjectState,
    Opened,
    Step,
    ValueSpec,
    as_length,
    counted_in,
    is_openable,
    length_of,
)
from fxshard.passes.trace.python_state.bound import Bound, is_bound
from fxshard.shapes.arguments import path_name

Reads = tuple[tuple[int, tuple[Step, ...], bool], ...]
"""How to reach each output after the call: (index of the object, -1 for the model's result; steps from it; whether it is a number)."""
Fill = tuple[int, Step, ValueSpec]
"""(index of the object, step to one of its parts, the value to store there, built from inputs)."""


def outcome_of_call(
    twin: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, mode: FakeTensorMode
) -> tuple[CallResultSpec, Reads] | None:
    """Runs ``twin``, a copy of the model, on ``leaves``, fakes of ``mode``, and returns the structure of the call's outcome.

    None if arguments and results are tensors in plain containers, and no argument is changed. Raises TraceError for a result, or a value
    stored in an argument, that is opaque.
    """
    call = pytree.tree_unflatten(leaves, spec)
    given: dict[int, ValueSpec] = {id(x): ("given", i) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    before = _walked(call, given, spec)
    given |= {i: part for i, part in before.seen.items() if part[0] == "given length"}
    env = mode.shape_env
    fresh = env.ignore_fresh_unbacked_symbols() if env else contextlib.nullcontext()
    with mode, fresh, torch.random.fork_rng(devices=[]):
        result = twin(*call[0], **call[1])
    walk = Flattener(given, objects=list(before.objects), places=list(before.places), nodes=[None] * len(before.nodes))
    walk.seen = {id(x): ("node", i) for i, x in enumerate(before.objects)}
    root = walk.part(result, "outputs")
    for i, one in enumerate(before.objects):
        walk.nodes[i] = walk.node(one, before.places[i], i, i, ())
    known = tuple(node for node in before.nodes if node is not None)
    nodes = tuple(None if i < len(known) and node == known[i] else node for i, node in enumerate(walk.nodes))
    _refuse_unseen(root, nodes, known)
    plain = all(node is None or node.kind in LISTS or node.kind in MAPPINGS for node in nodes)
    if plain and not any(map(_takes_inputs, known)) and all(node is None for node in nodes[: len(known)]):
        return None
    counts = dict(_counts(before, nodes))
    counters = frozenset(one for one in counts.values() if one is not None)
    return CallResultSpec(root, nodes, known, tuple(walk.paths), _inside(root, nodes), tuple(counts), counters), _reads(walk)


def _reads(walk: Flattener) -> Reads:
    return tuple((of, steps, isinstance(x, torch.SymInt)) for (of, steps), x in zip(walk.reached, walk.tensors, strict=True))


def _counts(before: Flattener, nodes: Sequence[ObjectState | None]) -> Iterable[tuple[str, tuple[type, Any] | None]]:
    """(path, attribute) of the integers in objects that the call changes, such as counters; the attribute is None for list and dict
    items."""
    for old, new, path in zip(before.nodes, nodes, before.places, strict=False):
        if old is None or new is None:
            continue
        parts, plain = dict(zip(new.keys, new.parts, strict=True)), old.kind in LISTS or old.kind in MAPPINGS
        for key, was in zip(old.keys, old.parts, strict=True):
            now = parts.get(key, ())
            if was[:2] == ("value", int) and was != now and (now[:2] == ("value", int) or now[:1] == ("length",)):
                yield (f"{path}[{key!r}]", None) if plain else (f"{path}.{key}", (old.kind, key))


def _walked(call: Any, given: dict[int, ValueSpec], spec: pytree.TreeSpec) -> Flattener:
    """Flattens the objects among the arguments of a call with structure ``spec``, in the order of ``open_call``."""
    counted, lengths = counted_in(spec)
    walk = Flattener(given, counted, iter(lengths))
    for path, leaf in pytree.tree_flatten_with_path(call, is_leaf=lambda x: is_openable(type(x)))[0]:
        if is_openable(type(leaf)):
            walk.part(leaf, path_name(path))
    return walk


def _parts(part: ValueSpec) -> Iterable[ValueSpec]:
    """A part and all parts nested in it."""
    yield part
    if part[0] in ("tuple", "tree"):
        for inner in part[-1]:
            yield from _parts(inner)


_GIVEN = ("given", "given length")


def _takes_inputs(node: ObjectState) -> bool:
    return any(inner[0] in _GIVEN for part in node.parts for inner in _parts(part))


_MADE = ("tensor", "length")


def _inside(root: ValueSpec, nodes: Sequence[ObjectState | None]) -> frozenset[int]:
    """Outputs that are only inside an object, not in plain containers of the result."""
    plain: set[int] = set()
    todo, done = [root], set[int]()
    while todo:
        for part in _parts(todo.pop()):
            node = nodes[part[1]] if part[0] == "node" else None
            if part[0] in _MADE:
                plain.add(part[1])
            elif node is not None and part[1] not in done and (node.kind in LISTS or node.kind in MAPPINGS):
                done.add(part[1])
                todo += node.parts
    every = {p[1] for node in nodes if node is not None for part in node.parts for p in _parts(part) if p[0] in _MADE}
    return frozenset(every - plain)


def _refuse_unseen(root: ValueSpec, nodes: Sequence[ObjectState | None], before: Sequence[ObjectState]) -> None:
    """Raises TraceError for a new opaque value: it would remain the one that was created in the run on fakes."""
    known = {inner for node in before for part in node.parts for inner in _parts(part) if inner[0] == "held"}
    for part in (root, *(p for node in nodes if node is not None for p in node.parts)):
        for inner in _parts(part):
            if inner[0] == "held" and inner not in known and not isinstance(inner[1].value, FIXED):
                kind = type(inner[1].value)
                raise TraceError(
                    f"the model returns a {kind.__module__}.{kind.__qualname__}, or leaves one in an argument, and that cannot be taken "
                    "apart into tensors",
                    remedy="keep tensors in tuples, lists, dicts or objects of a class written in Python, or register the class as a node "
                    "of torch's pytree, flatten_with_keys_fn included",
                )


FIXED = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum, range, slice)
"""Types of opaque values that are the same in each call."""


class TensorFunction(nn.Module):
    """``model`` as a function of tensors only, which returns the values that ``reads`` reaches; integers are lengths of tensors.

    ``leaves``: the leaves of the call; ``spec``: their structure, with objects as ``Opened``; ``bound``: for each leaf whether it is a
    constant rather than an input.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, bound: Sequence[bool], reads: Reads) -> None:
        super().__init__()
        self.model, self.reads = model, reads
        free = [i for i, held in enumerate(bound) if not held]
        marks = [_Placeholder(i) for i in range(len(leaves))]
        call = pytree.tree_unflatten([x if held else mark for x, held, mark in zip(leaves, bound, marks, strict=True)], spec)
        walk = _walked(call, {id(mark): ("given", mark.place) for mark in marks}, spec)
        self.objects = walk.objects
        place = {leaf: index for index, leaf in enumerate(free)}
        self.fills = tuple(_fills(walk.nodes, place))
        flat, self.spec = pytree.tree_flatten(call, is_leaf=lambda x: is_openable(type(x)))
        self.bound = [None if isinstance(x, _Placeholder) else x for x in flat]
        self.free = [(i, place[x.place]) for i, x in enumerate(flat) if isinstance(x, _Placeholder)]

    def forward(self, *free: Any, **taps: Any) -> Any:
        leaves = list(self.bound)
        for i, index in self.free:
            leaves[i] = free[index]
        for k, (how, key), part in self.fills:
            if how == "attr":
                object.__setattr__(self.objects[k], key, self._value(part, free))
            else:
                self.objects[k][key] = self._value(part, free)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.model(*args, **kwargs, **taps)
        found = []
        for k, steps, number in self.reads:
            value = result if k < 0 else self.objects[k]
            for how, key in steps:
                value = getattr(value, key) if how == "attr" else value[key]
            found.append(as_length(value) if number else value)
        return tuple(found)

    def _value(self, part: ValueSpec, free: Any) -> Any:
        if part[0] == "given":
            return free[part[1]]
        if part[0] == "given length":
            return length_of(free[part[1]])
        if part[0] == "node":
            return self.objects[part[1]]
        if part[0] == "value":
            return part[1]
        values = [self._value(p, free) for p in part[2]]
        return tuple(values) if part[1] is tuple else part[1](*values)


class _Placeholder:
    """Placeholder for an input and its length."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place

    @property
    def shape(self) -> tuple[_Placeholder]:
        return (self,)


def _fills(nodes: Sequence[ObjectState | None], place: dict[int, int]) -> Iterable[Fill]:
    for k, node in enumerate(nodes):
        if node is None or not _takes_inputs(node):
            continue
        how = "item" if node.kind in LISTS or node.kind in MAPPINGS else "attr"
        for key, part in zip(node.keys, node.parts, strict=True):
            if any(inner[0] in _GIVEN for inner in _parts(part)):
                yield k, (how, key), _template(part, place)


def _template(part: ValueSpec, place: dict[int, int]) -> ValueSpec:
    """A part that contains inputs, with leaf indices replaced by indices among the inputs."""
    if part[0] in _GIVEN:
        return (part[0], place[part[1]])
    if part[0] == "tuple":
        return ("tuple", part[1], tuple(_template(p, place) for p in part[2]))
    if part[0] == "node":
        return part
    if part[0] == "value" and part[1] is not float:
        return ("value", part[2])
    what = f"an object among the arguments holds tensors in a {getattr(part[1], '__name__', 'value')}"
    raise TraceError(what, remedy="hold them in attributes, lists, dicts or tuples")


def has_objects(spec: pytree.TreeSpec) -> bool:
    return spec.type is Opened or any(map(has_objects, spec.children()))


def capture_call(
    model: nn.Module,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    outcome: Callable[[], tuple[CallResultSpec, Reads] | None],
    taps: Mapping[str, Any],
) -> tuple[fx.GraphModule, pytree.TreeSpec]:
    """Dynamo's graph of a call and the structure of its outputs; objects among arguments and results are represented by their tensors.

    ``outcome``: computes the structure of the call's outcome; called if the call takes objects or cannot be captured directly. ``taps``:
    further keyword arguments for ``model``.
    """
    bound = list(map(is_bound, leaves))
    free = [leaf for leaf, held in zip(leaves, bound, strict=True) if not held]
    found = outcome() if has_objects(spec) else None
    if found is None:
        try:
            if any(bound) or has_objects(spec):
                captured = capture_dynamo_graph(Bound(model, leaves, spec))(*free, **taps)
            else:
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                captured = capture_dynamo_graph(model)(*args, **kwargs, **taps)
            return captured, captured_out_spec(captured)
        except Exception:
            found = None if has_objects(spec) else _quietly(outcome)
            if found is None:
                raise
    after, reads = found
    return capture_dynamo_graph(TensorFunction(model, leaves, spec, bound, reads))(*free, **taps), after.spec


def _quietly(outcome: Callable[[], tuple[CallResultSpec, Reads] | None]) -> tuple[CallResultSpec, Reads] | None:
    """``outcome()``, None if it fails too: Dynamo's error is the one to report then."""
    try:
        return outcome()
    except FxshardError as error:
        if error.__cause__ is not None:  # the model could not be copied
            return None
        raise
    except Exception:
        return None
