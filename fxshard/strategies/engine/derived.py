"""Rules derived from the functional form of an operator: ``x_`` in place, ``x.out`` with given outputs, ``_foreach_x`` on lists.

Each has the rule of its functional form. A tensor that is written into has the layout of the result. In a list, dims with equal
factor names and sizes are sharded together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fxshard._torch_compat.operators import schema_of
from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Dims, Factors, Linear, Rule, resolve

Find = Callable[[str], Rule | None]
"""Operator name -> its rule, if the operator runs unchanged on shards."""
FOREACH_PREFIX = "aten._foreach_"
ELEMENT_OVERLOADS = {
    "List": ("Tensor", "Tensor_Tensor", "default"),
    "Scalar": ("Scalar", "Tensor_Scalar", "default", "Tensor"),
    "ScalarList": ("Scalar", "Tensor_Scalar", "default", "Tensor"),
    "Tensor": ("Tensor",),
    "default": ("default",),
}
"""Overload of a foreach operator -> overloads of the operator on one element, in the order in which they are tried."""


def derive(op: str, find: Find) -> Rule | None:
    """The rule of ``op`` from that of its functional form; None if there is no such form or it has no rule."""
    if op.startswith(FOREACH_PREFIX):
        return _foreach(op, find)
    overload = _overload(op)
    schema = None if overload is None else schema_of(overload)
    if schema is None or not schema.is_mutable:
        return None
    functional = _functional(op, schema)
    rule = None if functional is None else find(functional)
    if functional is None or rule is None:
        return None
    return functools.partial(_out_variant if any(a.is_out for a in schema.arguments) else _in_place, rule, functional)


def _overload(op: str) -> Any:
    try:
        return functools.reduce(getattr, op.split("."), torch.ops)
    except (AttributeError, RuntimeError):
        return None


def _functional(op: str, schema: Any) -> str | None:
    """The overload that takes the same arguments, without those to write into, and mutates none."""
    namespace, name, _ = op.split(".")
    base = name if any(a.is_out for a in schema.arguments) else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    for kind in packet.overloads() if packet is not None else ():
        candidate = schema_of(getattr(packet, kind))
        if candidate is not None and not candidate.is_mutable and _signature(candidate) == _signature(schema):
            return f"{namespace}.{base}.{kind}"
    return None


def _signature(schema: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]


def _in_place(rule: Rule, functional: str, call: Call) -> Factors:
    """The rule of an in-place operator: operand 0 shares its memory, and so its layout, with output 0."""
    found = rule(replace(call, op=functional))
    return replace(found, enforce=(*found.enforce, (0, 0)))


def _out_variant(rule: Rule, functional: str, call: Call) -> Factors:
    """The rule of an ``out=`` overload: the last operands are only written, so each is pending where its result is."""
    given = dict(call.kwargs)
    becomes = {given[name].index: o for o, name in enumerate(_out_names(call.op)) if isinstance(given.get(name), Operand)}
    written = tuple(sorted(becomes))
    read = len(call.operands) - len(written)
    kwargs = tuple((name, value) for name, value in call.kwargs if name not in _out_names(call.op))
    found = rule(replace(call, op=functional, kwargs=kwargs, operands=call.operands[:read]))
    dims: list[Dims] = [found.outputs[becomes[i]] or () for i in written]
    return replace(
        found,
        operands=(*found.operands, *dims),
        linear=tuple(replace(group, operands=(*group.operands, *written)) for group in found.linear if group.operands),
        additive=(*found.additive, *written),
        depends=found.depends or tuple(tuple(range(read)) for _ in found.outputs),
        enforce=(*found.enforce, *((i, becomes[i]) for i in written)),
    )


def _out_names(op: str) -> list[str]:
    """Names of the ``out=`` arguments, in the order of the results."""
    schema = schema_of(_overload(op))
    assert schema is not None, f"{op} got its rule by its schema"
    return [a.name for a in schema.arguments if a.is_out]


def _foreach(op: str, find: Find) -> Rule | None:
    name, _, kind = op.removeprefix(FOREACH_PREFIX).partition(".")
    for overload in ELEMENT_OVERLOADS.get(kind, ()):
        functional = f"aten.{name}.{overload}"
        rule = find(functional)
        if rule is not None:
            return functools.partial(_foreach_factors, rule, functional)
    return None


def _foreach_factors(rule: Rule, functional: str, call: Call) -> Factors:
    """Joins the rules of all elements; factors of equal name and size become one factor."""
    operands: list[Dims] = [((),) * meta.ndim for meta in call.operands]
    outputs: list[Dims | None] = []
    depends: list[tuple[int, ...]] = []
    parts: list[tuple[Factors, tuple[int, ...], Callable[[str], str]]] = []
    for element, places in _elements(functional, call):
        part, sizes = resolve(rule(element), element)

        def named(factor: str, sizes: dict[str, Any] = sizes) -> str:
            return f"{factor}_{sizes.get(factor, 1)}"

        for place, dims in zip(places, part.operands, strict=True):
            operands[place] = _renamed(dims, named)
        outputs += [None if dims is None else _renamed(dims, named) for dims in part.outputs]
        depends.append(places)
        parts.append((part, places, named))
    return Factors(
        tuple(operands),
        tuple(outputs),
        reduce={named(f): how for part, _, named in parts for f, how in part.reduce.items()},
        replicated=frozenset(named(f) for part, _, named in parts for f in part.replicated),
        linear=_joint_linear_groups(parts),
        additive=tuple(places[i] for part, places, _ in parts for i in part.additive),
        depends=tuple(depends),
    )


def _elements(functional: str, call: Call) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Each element's call, and the operands of the list call that it reads."""
    for i, out in enumerate(call.outputs):
        args = [a[i] if isinstance(a, tuple) else a for a in call.args]
        places = tuple(a.index for a in args if isinstance(a, Operand))
        count = iter(range(len(places)))
        own = tuple(Operand(next(count)) if isinstance(a, Operand) else a for a in args)
        yield Call(functional, own, call.kwargs, tuple(call.operands[p] for p in places), (out,)), places


def _renamed(dims: Dims, named: Callable[[str], str]) -> Dims:
    return tuple(tuple(map(named, dim)) for dim in dims)


def _joint_linear_groups(parts: list[tuple[Factors, tuple[int, ...], Callable[[str], str]]]) -> tuple[Linear, ...]:
    """Linear groups of the list call: those through which every element passes a reduction in the same way."""
    joint = []
    if len({tuple((len(g.operands), g.gives, g.unread, g.converts, g.real) for g in part.linear) for part, _, _ in parts}) != 1:
        return ()
    for groups in zip(*(part.linear for part, _, _ in parts), strict=True):
        members = [places[i] for group, (_, places, _) in zip(groups, parts, strict=True) for i in group.operands]
        ops = tuple(op for op in groups[0].ops if all(op in group.ops for group in groups))
        joint.append(replace(groups[0], operands=tuple(dict.fromkeys(members)), ops=ops))
    return tuple(joint)
