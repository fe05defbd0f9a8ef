"""The registry: operator name -> its rule and its local form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fxshard.errors import RuleError
from fxshard.graph.call import Call
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import NodeCollective, OpSpec
from fxshard.strategies.engine.derived import derive
from fxshard.strategies.engine.factors import Factors, Rule
from fxshard.strategies.engine.local import LocalContext, LocalForm
from fxshard.strategies.engine.packed import PackedOption, Packs, by_factor

PackedForm = Callable[[Call, Packs, Factors, dict[str, Any]], Iterable[PackedOption]]
"""The options of a call on packed dims, from the call, its packed dims, and its resolved rule with the sizes of factors."""

OwnCollectives = Callable[[Call, OpSpec, Mesh], tuple[NodeCollective, ...]]


@dataclass(frozen=True)
class Registered:
    """``size_argument``: position of the argument that is the shape of output 0; ``local``: emits the local operator;
    ``collectives``: those that it then issues.

    ``description``: text of a user's registration; empty for built-in rules. ``packed``: the options on packed dims.
    """

    rule: Rule
    local: LocalForm | None = None
    size_argument: int | None = None
    description: str = ""
    packed: PackedForm | None = None
    collectives: OwnCollectives | None = None

    @property
    def packed_form(self) -> PackedForm | None:
        """The options on packed dims; None if there are none, because the local form may depend on the shard's position."""
        return self.packed or (by_factor if self.local is None else None)

    @property
    def ignores_position(self) -> bool:
        """Whether the local form does not depend on which elements of a sharded dim it gets."""
        return self.local is None or self.packed is not None


_RULES: dict[str, Registered] = {}
_ON_CHANGE: list[Callable[[], None]] = []


def register(
    ops: str | Iterable[str],
    rule: Rule,
    *,
    local: LocalForm | None = None,
    size_argument: int | None = None,
    override: bool = False,
    description: str = "",
    packed: PackedForm | None = None,
    collectives: OwnCollectives | None = None,
) -> None:
    """Registers the rule of operators (``"aten.mm.default"``); raises RuleError if one has a rule already, unless ``override``."""
    for op in [ops] if isinstance(ops, str) else ops:
        if op in _RULES and not override:
            raise RuleError(f"{op} has a rule already", remedy="pass override=True to replace it")
        _RULES[op] = Registered(rule, local, size_argument, description, packed, collectives)
    for forget in _ON_CHANGE:
        forget()


def on_change(forget: Callable[[], None]) -> None:
    """Calls ``forget`` whenever a rule is registered, to empty caches that depend on rules."""
    _ON_CHANGE.append(forget)


@contextlib.contextmanager
def temporary_rule(op: str, rule: Rule) -> Iterator[None]:
    """Gives ``op`` this ``rule`` inside the block, and restores the previous one after it."""
    before = _RULES.get(op)
    register(op, rule, override=True)
    try:
        yield
    finally:
        del _RULES[op]
        if before is not None:
            _RULES[op] = before
        for forget in _ON_CHANGE:
            forget()


def lookup(op: str) -> Registered | None:
    """The operator's own entry, or one derived from its functional form (in-place, ``out=`` and foreach operators)."""
    return _RULES.get(op) or _derived(op)


@lru_cache(maxsize=4096)
def _derived(op: str) -> Registered | None:
    rule = derive(op, _plain_rule)
    return None if rule is None else Registered(rule)


on_change(_derived.cache_clear)


def _plain_rule(op: str) -> Rule | None:
    """The rule of an operator that runs unchanged on shards."""
    entry = _RULES.get(op)
    return entry.rule if entry is not None and entry.local is None and entry.size_argument is None else None


def has_rule(op: str) -> bool:
    return lookup(op) is not None


def registered_ops() -> tuple[str, ...]:
    """Names of all operators with a rule, sorted."""
    return tuple(sorted(_RULES))


def rule_names() -> list[str]:
    """The operators with an entry of their own (``"aten.mm.default"``)."""
    return list(_RULES)


def registered_user_rules() -> dict[str, str]:
    """Operator -> text of the user's registration."""
    return {op: entry.description for op, entry in sorted(_RULES.items()) if entry.description}


def local_form(call: Call) -> LocalForm:
    """The local form of ``call``: the one registered with its rule, or the operator itself with its size argument made local."""
    entry = lookup(call.op)
    if entry is None:
        return unchanged
    if entry.local is not None:
        return entry.local
    return unchanged if entry.size_argument is None else resized(entry.size_argument)


def own_collectives(call: Call, spec: OpSpec, mesh: Mesh) -> tuple[NodeCollective, ...]:
    """The collectives that the local form of ``call`` issues itself, in order; none for most operators."""
    entry = lookup(call.op)
    return () if entry is None or entry.collectives is None else entry.collectives(call, spec, mesh)


def unchanged(ctx: LocalContext) -> Any:
    """The same operator on the shards."""
    return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)


def resized(position: int) -> LocalForm:
    """The same operator, argument ``position`` replaced by the local shape of output 0."""

    def local(ctx: LocalContext) -> Any:
        return ctx.emit(ctx.target, *replaced(ctx.args, {position: list(ctx.output_shape())}), **ctx.kwargs)

    return local


def replaced(args: tuple[Any, ...], values: dict[int, Any]) -> tuple[Any, ...]:
    """``args`` with the arguments at some positions replaced."""
    return tuple(values.get(i, a) for i, a in enumerate(args))
