"""Samples: calls by which the oracle checks an operator, recorded from torch's own samples or given by the user.

Each sample has several variations with other values, to expose combinations that hold by accident.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxshard._torch_compat import pytree
from fxshard._torch_compat.operators import schema_of
from fxshard.errors import OptionError
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.user_rules import find
from fxshard.strategies.oracle.pieces import power_of_two

FACTORS = (1.0, 1.0, -23.0, 0.5)
"""Factors by which the variations scale the values; all but the first also shuffle them."""
DENSE, SPARSE = 2, 3
"""Indices of the variations in which a slice across each dim is True (booleans only), or zero."""
ORDERED = ("offsets", "offs", "lengths", "cum_seq_q", "cum_seq_k", "crow_indices", "ccol_indices", "batch_sizes")


@dataclass(frozen=True)
class Sample:
    """One call ``op(*args, **kwargs)`` on whole tensors; ``op`` like ``"aten.mm.default"``."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor operands, in order of occurrence."""
        return [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]

    @functools.cached_property
    def marked(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with ``Operand(i)`` for the tensors."""
        count = iter(range(len(self.tensors)))
        marked: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda a: Operand(next(count)) if isinstance(a, torch.Tensor) else a, (self.args, self.kwargs)
        )
        return marked

    @functools.cached_property
    def outs(self) -> dict[int, int]:
        """``out=`` operand -> the output that it receives."""
        schema = schema_of(operator(self.op))
        names = [a.name for a in schema.arguments if a.is_out] if schema else []
        given = self.marked[1]
        return {given[name].index: o for o, name in enumerate(names) if isinstance(given.get(name), Operand)}

    def __str__(self) -> str:
        def text(value: Any) -> str:
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)

        args = [str(pytree.tree_map(text, a)).replace("'", "") for a in self.args]
        return ", ".join([*args, *(f"{k}={pytree.tree_map(text, v)}" for k, v in self.kwargs.items())])


@functools.cache
def operator(op: str) -> Any:
    """The overload called ``op``; raises OptionError if there is none."""
    return find(qualified(op))


def qualified(op: str) -> str:
    """The name in a graph: ``mylib::op`` is ``mylib.op.default``, ``aten.mm`` is ``aten.mm.default``."""
    name = op.replace("::", ".").removeprefix("torch.ops.")
    return f"{name}.default" if name.count(".") == 1 else name


def run(op: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The outputs of an operator as a tuple."""
    with torch.no_grad():
        result = operator(op)(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def given_samples(op: str, given: Any, where: str) -> list[Sample]:
    """Samples from a user's list of argument tuples, or of (arguments, keywords); raises OptionError for anything else."""
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(entry, (list, tuple)) for entry in given):
        remedy = "return [(x, y), ...] or [((x, y), {'dim': 1}), ...]"
        raise OptionError("the samples are not a list of argument tuples", where=where, remedy=remedy)
    samples = [Sample(op, *_detached(_arguments(entry))) for entry in given]
    if any(t.is_meta for s in samples for t in s.tensors):
        raise OptionError("a sample holds a tensor on meta, which has no numbers", where=where, remedy="give tensors with random numbers")
    return samples


def _detached(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    plain: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    return plain


def _arguments(entry: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(entry) == 2 and isinstance(entry[0], (list, tuple)) and isinstance(entry[1], dict):
        return tuple(entry[0]), dict(entry[1])
    return tuple(entry), {}


def call_of_sample(sample: Sample, outputs: Sequence[Any]) -> Call:
    """The ``Call`` of a sample, as rules take it."""
    args, kwargs = sample.marked
    named = tuple(sorted((k, _freeze(v)) for k, v in kwargs.items()))
    metas = [None if not isinstance(t, torch.Tensor) else TensorMeta(tuple(t.shape), t.dtype) for t in (*sample.tensors, *outputs)]
    count = len(sample.tensors)
    ins = tuple(m for m in metas[:count] if m is not None)
    return Call(sample.op, _freeze(args), named, ins, tuple(metas[count:]))


def _freeze(value: Any) -> Any:
    return tuple(_freeze(v) for v in value) if isinstance(value, (list, tuple)) else value


def filled(sample: Sample, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``tensors`` in place of the operands."""
    args, kwargs = pytree.tree_map(lambda a: tensors[a.index] if isinstance(a, Operand) else a, sample.marked)
    return args, kwargs


def variations(sample: Sample) -> Iterator[list[torch.Tensor]]:
    """The operands with several values: unchanged; shuffled; also scaled by -23; also half of them zero, scaled to magnitude 1.

    Integers may be indices, so they are not scaled; instead half of them become zero. Equal floating-point values become random ones.
    """
    ordered = _ordered(sample)
    for number in range(len(FACTORS)):
        yield [t if number == 0 or i in ordered else _varied(t, number, i) for i, t in enumerate(sample.tensors)]


def _ordered(sample: Sample) -> set[int]:
    """Operands that must stay sorted, such as offsets; kernels do not check them."""
    schema = schema_of(operator(sample.op))
    args, kwargs = sample.marked
    names = [a.name for a in schema.arguments] if schema else []
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {v.index for name, v in given.items() if name in ORDERED and isinstance(v, Operand)}


def _varied(x: torch.Tensor, number: int, operand: int) -> torch.Tensor:
    real, factor = is_inexact(x.dtype), FACTORS[number]
    if x.numel() < 2:
        return x * factor if real else x
    generator = torch.Generator().manual_seed(zlib.crc32(repr((tuple(x.shape), (number, operand))).encode()))
    if bool((x == x.flatten()[0]).all()):
        if not real:
            return x
        x = torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    shuffled = x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)
    shuffled = torch.empty_like(x).copy_(shuffled)
    kept = torch.rand(x.shape, generator=generator) < 0.5
    if number == SPARSE:
        factor = 1 / power_of_two(x) if real else factor
        shuffled = shuffled.where(kept & ~_slabs(x.shape, generator), torch.zeros_like(x))
    if x.dtype == torch.bool:
        return shuffled | _slabs(x.shape, generator) if number == DENSE else shuffled
    return shuffled * factor if real else shuffled.where(kept, torch.zeros_like(x)) if number == DENSE else shuffled


def _slabs(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """True for one random index of each dim of size above 1, so that a reduction along any dim meets a slice of only True."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for dim, size in enumerate(shape):
        if size > 1:
            mask.select(dim, int(torch.randint(size, (), generator=generator))).fill_(True)
    return mask


def signature(sample: Sample) -> tuple[Any, ...]:
    """Key under which samples differ in values only."""
    args, kwargs = sample.marked
    shapes = tuple((tuple(t.shape), t.dtype, t.stride()) for t in sample.tensors)
    return shapes, repr(args), repr(sorted(kwargs.items(), key=str))


def kind(sample: Sample) -> tuple[Any, ...]:
    """Key of samples that are worth only one check: numbers of dims, dtypes, sizes of 0 or 1, contiguity, given arguments."""
    args, kwargs = sample.marked
    shapes = tuple((tuple(min(s, 2) for s in t.shape), t.dtype, t.is_contiguous()) for t in sample.tensors)
    plain = [
        a if isinstance(a, (bool, str, type(None))) else type(a) for a in pytree.tree_leaves((args, kwargs), is_leaf=lambda a: a is None)
    ]
    return shapes, tuple(plain)


def spread_out(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Up to ``count`` samples, of different kinds first, ordered from most elements to scalars and empty tensors."""
    distinct = list({signature(s): s for s in samples}.values())
    order = sorted(distinct, key=lambda s: math.prod(min(t.numel(), 64) + 1 for t in s.tensors[:3]), reverse=True)
    firsts = list({kind(s): s for s in reversed(order)}.values())[::-1]
    rest = [s for s in order if not any(s is f for f in firsts)]
    if len(firsts) > count:
        return [firsts[round(i * (len(firsts) - 1) / max(count - 1, 1))] for i in range(count)]
    return [*firsts, *rest[: count - len(firsts)]]
