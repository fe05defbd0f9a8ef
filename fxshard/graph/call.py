"""A rule's view of a node: the operator, its plain arguments, and the shapes of its tensors. Hashable, so that results can be cached."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, are_numbers, expression, hint_of, is_symbolic
from fxshard.graph.planning_graph import PlanningGraph, is_tensor, operands, outputs_of, plain_shape, planned_nodes
from fxshard.graph.targets import name_of


@dataclass(frozen=True)
class TensorMeta:
    """Global shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Operand:
    """Placeholder in ``Call.args`` for the ``index``-th tensor operand."""

    index: int


@dataclass(frozen=True)
class Call:
    """One call of an operator on global tensors.

    ``op``: ``"aten.mm.default"``; ``args``/``kwargs``: as in the graph, tensors replaced by ``Operand(i)``, lists by
    tuples; ``operands``: the tensor operands in order of occurrence; ``outputs``: None for an output that is not a tensor. ``any_size``:
    whether some size of an operand is only an example of a dynamic one. ``traffic``: the fraction of each operand that it reads from
    memory, then of each output that it writes, if it shares a kernel with its neighbours; None: all of them.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta | None, ...]
    any_size: bool = False
    traffic: tuple[float, ...] | None = None

    def arg(self, position: int, name: str | None = None, default: Any = None) -> Any:
        """Argument by position, or by keyword ``name``, or ``default``."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default) if name else default

    def meta(self, position: int) -> TensorMeta | None:
        """Shape and dtype of the tensor at argument ``position``, None if the argument is not a tensor."""
        value = self.arg(position)
        return self.operands[value.index] if isinstance(value, Operand) else None

    @property
    def output(self) -> TensorMeta:
        """The output of a call that has only one, a tensor."""
        (out,) = self.outputs
        assert out is not None
        return out

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.kwargs, self.operands, self.outputs, self.any_size, self.traffic))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def is_hashable(self) -> bool:
        """False if the call holds symbolic numbers: torch does not hash some of them, and others by their example values."""
        if any(isinstance(x, SYMBOLIC) for x in pytree.tree_leaves((self.args, self.kwargs))):
            return False
        try:
            hash(self)
        except TypeError:
            return False
        return True


CACHE_SIZE = 50_000
"""Maximum number of cached calls."""

_CALLS: dict[Hashable, Call] = {}
_SYMBOLIC_CALLS: WeakKeyDictionary[fx.Graph, dict[Hashable, Call]] = WeakKeyDictionary()
"""Calls with symbolic sizes, cached as long as their graph lives."""


def call_of(node: fx.Node) -> Call:
    """The ``Call`` of a graph node, cached: nodes with equal arguments and values share one object, because layers repeat.

    Symbolic sizes stay symbolic.
    """
    try:
        key = name_of(node.target), _cache_key(node.args), _cache_key(node.kwargs), _cache_key(node.meta.get("val"))
        known = _CALLS.get(key)
    except TypeError:  # symbolic sizes, or a node that is not a tensor
        return _symbolic_call(node)
    if known is None:
        known = _CALLS[key] = _new_call(node)
        if len(_CALLS) > CACHE_SIZE:
            _CALLS.pop(next(iter(_CALLS)))
    return known


def _symbolic_call(node: fx.Node) -> Call:
    """``call_of`` for symbolic sizes; cached per graph, because symbols of one name differ between graphs."""
    calls = _SYMBOLIC_CALLS.setdefault(node.graph, {})
    try:
        key = name_of(node.target), *map(_symbolic_key, (node.args, node.kwargs, node.meta.get("val")))
        known = calls.get(key)
    except TypeError:  # a size known only at run time, or a node that is not a tensor
        return _new_call(node)
    if known is None:
        known = calls[key] = _new_call(node)
    return known


def calls_of(graph: PlanningGraph) -> Mapping[str, Call]:
    """The ``Call`` of each call node of a graph, by node name; computed once per graph."""
    if "calls" not in graph.cache:
        graph.cache["calls"] = {n.name: call_of(n) for n in planned_nodes(graph) if n.op == "call_function"}
    found: Mapping[str, Call] = graph.cache["calls"]
    return found


def example_call(node: fx.Node) -> Call:
    """The ``Call`` of a graph node, with the example's sizes in place of symbols."""
    call = call_of(node)
    return call if call.is_hashable else _at_example(call)


def _at_example(value: Any) -> Any:
    """``value`` with each symbol replaced by its hint."""
    if is_symbolic(value):
        return hint_of(value)
    if isinstance(value, tuple):
        return tuple(map(_at_example, value))
    if isinstance(value, TensorMeta):
        return TensorMeta(_at_example(value.shape), value.dtype)
    if isinstance(value, Call):
        return Call(value.op, *map(_at_example, (value.args, value.kwargs, value.operands, value.outputs)))
    return value


def _cache_key(value: Any) -> Hashable:
    """Cache key of an argument or value. Constants carry their type, because 1, 1.0 and True are different arguments."""
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if kind is fx.Node:
        value = value.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise TypeError("a call holds nodes that are not tensors themselves, and cannot be shared")
        return _sizes(value), value.dtype
    if isinstance(value, torch.Tensor):
        return _sizes(value), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_cache_key, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("symbols cannot be compared before run time")
    if isinstance(value, dict):
        return tuple((name, _cache_key(item)) for name, item in value.items())
    return kind, repr(value) if isinstance(value, float) else value  # 0.0 is not -0.0


def _symbolic_key(value: Any) -> Hashable:
    """``_cache_key`` for symbolic values: a symbolic number is keyed by its expression and its ShapeEnv."""
    if is_symbolic(value):
        return value.node.shape_env, expression(value)
    if isinstance(value, fx.Node) and is_tensor(value):
        return _symbolic_key(value.meta["val"])
    if isinstance(value, torch.Tensor):
        return tuple(map(_symbolic_key, value.shape)), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_symbolic_key, value))
    if isinstance(value, dict):
        return tuple((name, _symbolic_key(item)) for name, item in value.items())
    return _cache_key(value)


_CONSTANTS = frozenset({int, bool, str, type(None), torch.dtype})
"""Types of the most frequent constants, checked first for speed."""


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    shape = value.shape
    if not are_numbers(shape):
        raise TypeError("a symbolic size")
    return shape


def _new_call(node: fx.Node) -> Call:
    read, given = operands(node), outputs_of(node)
    places = iter(range(len(read)))
    args = tuple(_frozen(a, places) for a in node.args)
    kwargs = tuple(sorted((k, _frozen(v, places)) for k, v in node.kwargs.items()))
    reads = tuple(_meta_of(operand.meta["val"]) for operand in read)
    return Call(name_of(node.target), args, kwargs, reads, tuple(None if v is None else _meta_of(v) for v in given))


def _frozen(value: Any, places: Iterator[int]) -> Any:
    """An argument with tensors replaced by ``Operand`` (indices from ``places``), and lists by tuples."""
    if isinstance(value, fx.Node):
        return Operand(next(places)) if is_tensor(value) else value
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v, places) for v in value)
    if isinstance(value, dict):
        return {k: _frozen(v, places) for k, v in value.items()}
    return value


def _meta_of(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(plain_shape(value.shape), value.dtype)
