"""The text form of rules, after einops: ``rule("b m k, b k n -> b m n")`` is the whole rule of matmul.

Dims are separated by spaces, tensors by commas. ``h!`` is a factor that must stay whole, ``_`` an unnamed one that must stay
whole, ``1`` a dim without a factor, ``(a b)`` a dim merged from two factors, ``...`` any number of dims, aligned to the right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxshard.errors import RuleError
from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import EXTREMA, SUMS, SWAPPED, Factors, Name, Rule, factors, linear_groups, shapes_str

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z][A-Za-z0-9_]*!?|[_1()])")
Tensor = tuple[Name, ...]


@dataclass(frozen=True)
class TextRule:
    """A parsed rule in text form; called with a ``Call`` it returns ``Factors``."""

    pattern: str
    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    linear: tuple[Sequence[int], ...] = ()
    ops: tuple[str, ...] = SUMS
    at: tuple[int, ...] | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, call: Call) -> Factors:
        present = self._present(call)
        metas = [call.operands[i] for _, i in present]
        ins = [_expanded(self.operands[t], m.ndim, f"i{t}") for (t, _), m in zip(present, metas, strict=True)]
        if len(self.outputs) != len(call.outputs):
            raise self._misfit(call, f"it has {len(self.outputs)} outputs")
        outs = [
            None if m is None else _expanded(t, m.ndim, f"o{o}") for o, (t, m) in enumerate(zip(self.outputs, call.outputs, strict=True))
        ]
        return factors(ins, outs, linear=linear_groups(call, self.linear, self.ops), **self.properties)

    def _present(self, call: Call) -> list[tuple[int, int]]:
        """Pairs (entry of the pattern, operand), without entries whose optional argument is None."""
        if self.at is None:
            if len(self.operands) != len(call.operands):
                raise self._misfit(call, f"it has {len(self.operands)} operands")
            return [(i, i) for i in range(len(call.operands))]
        values = [(t, call.arg(position)) for t, position in enumerate(self.at)]
        return [(t, v.index) for t, v in values if isinstance(v, Operand)]

    def _misfit(self, call: Call, what: str) -> RuleError:
        return RuleError(
            f"rule {self.pattern!r} does not fit {call.op}({shapes_str(call.operands)}) -> {shapes_str(call.outputs)}: {what}",
            remedy="write one entry per tensor operand and per output",
        )


def rule(
    pattern: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    ops: tuple[str, ...] = SUMS,
    at: Sequence[int] | None = None,
    **properties: Any,
) -> TextRule:
    """A rule from its text form; raises RuleError if the text cannot be parsed.

    Args:
        pattern: operands -> outputs.
        linear: groups of argument positions through which a pending reduction passes, with ``ops``.
        at: argument position of each operand, where some operands are optional (None: left out).
        properties: further fields of ``Factors``.
    """
    left, arrow, right = pattern.partition("->")
    if not arrow or "->" in right:
        raise _unreadable(pattern, "it needs exactly one '->'")
    ins, outs = (tuple(_read(tensor, pattern) for tensor in side.split(",")) for side in (left, right))
    ins = ins if left.strip() else ()
    if at is not None and len(at) != len(ins):
        raise _unreadable(pattern, f"it has {len(ins)} operands, at= has {len(at)}")
    return TextRule(pattern, ins, outs, tuple(linear), ops, None if at is None else tuple(at), properties)


def einop_rule(pattern: str, *, enforce: Mapping[int, int] | None = None, **properties: Any) -> TextRule:
    """The rule of an operator that is linear in each operand.

    ``enforce``: operand -> the output that shares its memory, and so its layout.
    """
    count = len(pattern.partition("->")[0].split(","))
    return rule(pattern, linear=[(i,) for i in range(count)], enforce=tuple((enforce or {}).items()), **properties)


def pointwise_rule(
    *groups: Sequence[int],
    ops: tuple[str, ...] = SUMS,
    increasing: Sequence[int] = (),
    decreasing: Sequence[int] = (),
    products: Sequence[Sequence[int]] = (),
    compares: bool = False,
    real: bool = False,
    **properties: Any,
) -> Rule:
    """out[i] = f(a[i], b[i], ...) with operands broadcast from the right.

    Args:
        groups: argument positions in which f is jointly linear; ``ops`` pass through.
        increasing, decreasing: positions in each of which f is increasing or decreasing, so that maxima and minima pass through.
        products: positions in which f is jointly multiplicative: f(a a', b b') = f(a, b) f(a', b').
        compares: the result is that of a comparison, not a converted number.
        real: ``increasing``, ``decreasing`` and ``products`` hold for real numbers only, because integers wrap around.
    """

    def pointwise(call: Call) -> Factors:
        names = [f"d{i}" for i in range(max((o.ndim for o in (*call.operands, *call.outputs) if o is not None), default=0))]
        ins = [names[len(names) - o.ndim :] for o in call.operands]
        outs = [None if o is None else names[len(names) - o.ndim :] for o in call.outputs]
        order = {"converts": not compares, "real": real}
        passing = (
            *linear_groups(call, groups, ops),
            *linear_groups(call, [(i,) for i in increasing], EXTREMA, **order),
            *linear_groups(call, [(i,) for i in decreasing], EXTREMA, gives=SWAPPED, **order),
            *linear_groups(call, products, ("product",), **order),
        )
        return factors(ins, outs, linear=passing, **properties)

    return pointwise


def letters(equation: str) -> tuple[list[list[str]], list[list[str]]]:
    """Names of the dims of an einsum equation's operands and of its result."""
    left, _, right = equation.replace(" ", "").partition("->")
    return [list(tensor) for tensor in left.split(",")], [list(right)]


def _read(tensor: str, pattern: str) -> Tensor:
    names: list[Name] = []
    group: list[str] | None = None
    position = 0
    tensor = tensor.rstrip()
    while position < len(tensor):
        match = _TOKEN.match(tensor, position)
        if match is None:
            raise _unreadable(pattern, f"{tensor[position:].strip()[0]!r} is not a name, 'name!', '_', '1', '(' or '...'")
        position, token = match.end(), match.group(1)
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            names.append(tuple(group))
            group = None
        elif token in ("(", ")") or (group is not None and token in ("...", "_")):
            raise _unreadable(pattern, f"{token!r} is not allowed there in '{tensor.strip()}'")
        elif group is not None:
            group += [] if token == "1" else [token]
        else:
            names.append("" if token == "1" else token)
    if group is not None:
        raise _unreadable(pattern, f"'(' is not closed in '{tensor.strip()}'")
    return _checked(tuple(names), pattern)


def _checked(tensor: Tensor, pattern: str) -> Tensor:
    if tensor.count("...") > 1:
        raise _unreadable(pattern, "'...' occurs twice in one tensor")
    flat = [n.removesuffix("!") for name in tensor for n in ((name,) if isinstance(name, str) else name) if n not in ("_", "")]
    twice = sorted({n for n in flat if flat.count(n) > 1})
    if twice:
        raise _unreadable(pattern, f"factor {twice[0]!r} occurs twice in one tensor")
    return tensor


def _unreadable(pattern: str, what: str) -> RuleError:
    return RuleError(f"cannot read rule {pattern!r}: {what}", remedy="write it like 'b m k, b k n -> b m n'")


def _expanded(tensor: Tensor, ndim: int, prefix: str) -> list[Name]:
    """The tensor's names, with ``...`` expanded to the remaining dims and each ``_`` made unique."""
    named = len(tensor) - ("..." in tensor)
    rest = [f"~{i}" for i in reversed(range(max(ndim - named, 0)))]
    names: list[Name] = []
    for name in tensor:
        names += rest if name == "..." else [f"{prefix}_{len(names)}!"] if name == "_" else [name]
    return names
