"""The numbers among a call's plain arguments, and other values of them: a rule may be right for alpha = 1 alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxshard._torch_compat import schema_of
from fxshard.strategies.oracle.samples import Sample, operator

SIZES = ("scales", "scales_d", "scales_h", "scales_w", "scale_factors", "spatial_scale")
"""Real arguments that say where elements lie, which kernels do not check."""


def variants(sample: Sample) -> Iterator[Sample]:
    """The sample with one number of its plain arguments changed: negated, zero, one less, one more.

    A number is what the schema calls float or Scalar: dims, sizes and indices are int there. Those not given have their
    default. In a list all are changed, and the first one alone.
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
    """By keyword where it has to be; else by position, like all that stand before it, as rules look for it there."""
    named = dict(sample.kwargs)
    if arguments[position].kwarg_only:
        return Sample(sample.op, sample.args, {**named, arguments[position].name: value})
    before = [value if i == position else _value(sample, i, a) for i, a in enumerate(arguments[: max(position + 1, len(sample.args))])]
    for argument in arguments[: len(before)]:
        named.pop(argument.name, None)
    return Sample(sample.op, tuple(before), named)
