"""Variants of a sample with other numbers among its arguments: a rule may hold only for alpha = 1, say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxshard._torch_compat.operators import schema_of
from fxshard.strategies.oracle.samples import Sample, operator

SIZES = ("scales", "scales_d", "scales_h", "scales_w", "scale_factors", "spatial_scale")
"""Float arguments that determine positions; kernels do not check them."""


def variants(sample: Sample) -> Iterator[Sample]:
    """The sample with one numeric argument changed: negated, zero, one less, one more.

    Numeric arguments are those of schema type float or Scalar; dims, sizes and indices have type int. Omitted ones have their
    default. In a list, changes the first number alone, and all numbers.
    """
    schema = schema_of(operator(sample.op))
    arguments = schema.arguments if schema else ()
    for position, argument in enumerate(arguments):
        if _is_number(argument):
            for value in _others(_value(sample, position, argument)):
                yield _with(sample, arguments, position, value)


def _is_number(argument: Any) -> bool:
    kind = str(argument.type)
    return ("float" in kind or "number" in kind) and argument.name not in SIZES


def _value(sample: Sample, position: int, argument: Any) -> Any:
    given = position < len(sample.args) and not argument.kwarg_only
    return sample.args[position] if given else sample.kwargs.get(argument.name, argument.default_value)


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for number in value[:1]:
            for new in _others(number):
                yield [new, *value[1:]]
        for columns in zip(*map(_others, value), strict=False) if len(value) > 1 else ():
            yield list(columns)
    elif isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        yield from dict.fromkeys(v for v in (-value, type(value)(0), value - 1, value + 1) if v == v != value)


def _with(sample: Sample, arguments: Any, position: int, value: Any) -> Sample:
    """The sample with this argument: by keyword if it is keyword-only, else by position, with all arguments before it, as rules expect."""
    named = dict(sample.kwargs)
    if arguments[position].kwarg_only:
        return Sample(sample.op, sample.args, {**named, arguments[position].name: value})
    before = [value if i == position else _value(sample, i, a) for i, a in enumerate(arguments[: max(position + 1, len(sample.args))])]
    for argument in arguments[: len(before)]:
        named.pop(argument.name, None)
    return Sample(sample.op, tuple(before), named)
