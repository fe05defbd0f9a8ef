"""Rules that users register: for their own operators, or to replace a built-in rule.

>>> fxshard.register_rule("mylib::gate", "b s h, h -> b s h")
>>> fxshard.register_rule("mylib::gate_backward", "b s h, b s h, h -> b s h, h")
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from fxshard._torch_compat.dtensor.rules import sharding_functions
from fxshard._torch_compat.operators import find_operator, operator_names, schema_of
from fxshard.errors import OptionError, RuleError, a_kind, closest
from fxshard.layout.layouts import REDUCE_OPS
from fxshard.strategies.engine.factors import Factors, Rule
from fxshard.strategies.engine.fingerprint import fingerprint
from fxshard.strategies.engine.local import LocalForm
from fxshard.strategies.engine.notation import TextRule, rule
from fxshard.strategies.engine.registry import has_rule, register, registered_user_rules

_PROPERTIES = ("ops", "at", *(f.name for f in fields(Factors) if f.name not in ("operands", "outputs", "replicated")))
"""Keyword arguments that a rule in text form accepts."""


def all_user_rules() -> dict[str, str]:
    """Operator -> text of the user's rule, from ``register_rule`` or torch's ``register_sharding``; different rules differ in text."""
    return {op: describe_rule(function) for op, function in sharding_functions().items()} | registered_user_rules()


def register_rule(
    op: Any,
    given: str | Rule,
    *,
    local: LocalForm | None = None,
    size_argument: int | None = None,
    override: bool = False,
    **properties: Any,
) -> None:
    """Registers how an operator may be sharded; plans made from now on use it.

    Args:
        op: its name in torch.library (``"mylib::op"`` is its default overload, ``"mylib::op.out"`` another), or the
            operator itself.
        given: the rule: text (see ``fxshard.strategies.engine.notation``), or a function from a ``Call`` to ``Factors``.
        local: emits what a rank runs, if that is not the operator itself on its shards.
        size_argument: position of the argument that is the shape of output 0; each rank passes its local shape.
        override: replaces a rule that the operator has already.
        properties: for a rule in text form, keyword arguments of ``fxshard.strategies.rule`` (``linear``, ``reduce``, ``at``, ...).

    Raises:
        OptionError: no such operator, or no such property.
        RuleError: the text cannot be parsed or does not fit the operator's schema, or the operator has another rule.
    """
    operator = find(op)
    schema = functional_schema(operator, "register_rule")
    made = _rule(given, properties)
    if local is not None and not callable(local):
        raise OptionError(f"local is {a_kind(local)}", where="register_rule", remedy="pass a function of a LocalContext")
    if isinstance(made, TextRule):
        _check_fit(made, schema)
    description = _description(given, local, size_argument, properties)
    repeated = registered_user_rules().get(str(operator)) == description
    if has_rule(str(operator)) and not (override or repeated):
        raise RuleError(f"{schema.name} has a rule already", where="register_rule", remedy="pass override=True to replace it")
    register(str(operator), made, local=local, size_argument=size_argument, override=True, description=description)


def find(op: Any) -> Any:
    """The overload that ``op`` names or is; raises OptionError with the closest name if there is none."""
    operator = find_operator(re.sub(r"^(\w+)\.", r"\1::", op) if isinstance(op, str) else op)
    if operator is not None:
        return operator
    if not isinstance(op, str):
        remedy = 'pass a name ("mylib::op"), torch.ops.mylib.op.default, or what torch.library.custom_op returned'
        raise OptionError(f"{op!r} is not an operator of torch", where="op", remedy=remedy)
    overloads = [name for name in operator_names() if name.startswith(f"{op}.")]
    if overloads:
        what = f"{op} has no default overload; it has {', '.join(overloads)}"
    else:
        what = f"there is no operator {op!r}{closest(op, operator_names())}"
    raise OptionError(what, where="op", remedy="import the operator's module first; names are those of torch.library, 'mylib::op'")


@dataclass(frozen=True)
class _Tensors:
    """Positions of the tensor arguments: required ones, optional ones, and lists of tensors."""

    needed: tuple[int, ...]
    optional: tuple[int, ...]
    lists: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted((*self.needed, *self.optional, *self.lists)))


def _tensors(items: Any) -> _Tensors:
    kinds = {i: str(item.type) for i, item in enumerate(items) if "Tensor" in str(item.type)}
    lists = tuple(i for i, kind in kinds.items() if "List" in kind)
    optional = tuple(i for i, kind in kinds.items() if "Optional" in kind and i not in lists)
    return _Tensors(tuple(i for i in kinds if i not in (*lists, *optional)), optional, lists)


def functional_schema(operator: Any, where: str) -> Any:
    """The operator's schema; raises RuleError, naming it, if it mutates its arguments."""
    schema: Any = schema_of(operator)
    changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if changed:
        what = f"{schema.name} changes its arguments ({', '.join(changed)}); planned graphs do not contain such calls"
        raise RuleError(what, where=where, remedy="write an operator that returns new tensors, and give that one the rule")
    return schema


def _rule(given: Any, properties: dict[str, Any]) -> Rule:
    if isinstance(given, str):
        unknown = next((name for name in properties if name not in _PROPERTIES), None)
        if unknown is not None:
            what = f"a rule has no property {unknown!r}{closest(unknown, _PROPERTIES)}"
            raise OptionError(what, where="register_rule", remedy=f"use {', '.join(_PROPERTIES)}")
        made = rule(given, **properties)
        _check_properties(made, properties)
        return made
    if not callable(given):
        what = f"a rule is a string or a function, not {a_kind(given)}"
        raise OptionError(what, where="register_rule", remedy="write it like 'b m k, b k n -> b m n'")
    if properties:
        what = f"{', '.join(properties)} cannot be given with a rule that is a function"
        raise OptionError(what, where="register_rule", remedy="put it into the Factors that the function returns")
    return given


def _check_properties(made: TextRule, properties: dict[str, Any]) -> None:
    """Raises OptionError for values that no call could have."""
    dims = {name.removesuffix("!") for tensor in (*made.operands, *made.outputs) for dim in tensor for name in _names(dim)}
    for name, op in dict(properties.get("reduce", {})).items():
        if name not in dims:
            raise _unfit(f"reduce names {name!r}{closest(name, dims)}", f"the dims of the rule are {', '.join(sorted(dims))}")
        if op is not None and op not in REDUCE_OPS:
            raise _unfit(f"reduce has {op!r}{closest(op, REDUCE_OPS)}", f"reductions are {', '.join(REDUCE_OPS)}, or None")
    linear = properties.get("linear", ())
    if isinstance(linear, str) or not all(isinstance(group, (list, tuple, range)) for group in linear):
        raise _unfit(f"linear is {linear!r}", "write a list of groups of argument positions: linear=[[0], [1, 2]]")
    wrong = [i for i in properties.get("additive", ()) if not 0 <= i < len(made.operands)]
    if wrong:
        raise _unfit(f"additive names operand {wrong[0]}", f"the rule has {len(made.operands)}, counted from 0")


def _names(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim)


def _unfit(what: str, remedy: str) -> OptionError:
    return OptionError(what, where="register_rule", remedy=remedy)


def _description(given: Any, local: Any, size_argument: int | None, properties: dict[str, Any]) -> str:
    """The registration as text, which ranks compare."""
    parts = {**properties, "local": local, "size_argument": size_argument}
    others = [f"{name}={describe_rule(value)}" for name, value in parts.items() if value is not None]
    return ", ".join([describe_rule(given), *others])


def describe_rule(value: Any) -> str:
    """Text as it is; a function as its name and fingerprint, which, unlike its address, are equal in all processes."""
    if callable(value) and not isinstance(value, TextRule):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        return f"{name} (code {fingerprint(value)})"
    return str(value)


def _check_fit(made: TextRule, schema: Any) -> None:
    """Raises RuleError unless the pattern has one entry per tensor argument and per result of the schema."""
    tensors, results = _tensors(schema.arguments), _tensors(schema.returns)
    count = len(made.operands)
    if made.at is not None:
        wrong = [position for position in made.at if position not in tensors.all]
        if wrong:
            named = ", ".join(f"{i} ({schema.arguments[i].name})" for i in tensors.all)
            raise _misfit(made, schema, f"argument {wrong[0]} is not a tensor; tensors are {named}", "name those in at=")
    elif not tensors.lists and not len(tensors.needed) <= count <= len(tensors.all):
        takes = f"{len(tensors.needed)}" + (f" to {len(tensors.all)}" if tensors.optional else "")
        raise _misfit(made, schema, f"it has {count} operands, the operator takes {takes} tensors", "write one entry for each tensor")
    if not results.lists and len(made.outputs) != len(schema.returns):
        what = f"it has {len(made.outputs)} outputs, the operator returns {len(schema.returns)}"
        raise _misfit(made, schema, what, "write one entry for each result, an empty one if it is not a tensor")


def _misfit(made: TextRule, schema: Any, what: str, remedy: str) -> RuleError:
    return RuleError(f"rule {made.pattern!r} does not fit {schema}: {what}", where="register_rule", remedy=remedy)
