"""Factors: the legal shardings of an operator on one mesh axis, as names on the dims of its operands and outputs.

Sharding a factor shards each tensor on the dim that has it. An output without the factor, computed from an operand with
it, becomes ``Partial(reduce)``: out = reduce over ranks of out_rank. A dim of several factors can be sharded on its outermost factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.errors import RuleError
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.layout.layouts import REDUCE_OPS

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
Name = str | Sequence[str]
MOVEMENT = REDUCE_OPS
"""Reductions that commute with moving elements: all of them."""
SUMS = ("sum", "avg")
"""Reductions that commute with a linear map: op(f(x_1), f(x_2)) = f(op(x_1, x_2))."""
IDEMPOTENT = ("avg", "max", "min")
"""Reductions that map equal values on all ranks to that value."""
EXTREMA = ("max", "min")
"""Reductions that commute with an increasing function; a decreasing one swaps them."""
SWAPPED = (("max", "min"), ("min", "max"))


@dataclass(frozen=True)
class Linear:
    """Operands through which a pending reduction passes: if all are Partial(op) and the others whole, outputs that depend on them are
    Partial(op).

    Args:
        operands: the pending operands, all with the same reduction.
        ops: the reductions that pass through.
        gives: (op, the outputs' reduction), if it differs from the operands'.
        unread: the values of the operands do not matter, so the outputs stay whole.
        converts: an output of another dtype is a conversion, with which only some reductions commute; if False it is the result of a
            comparison, which is exempt.
        real: only for real and complex operands: integers wrap around, which breaks their order.
    """

    operands: tuple[int, ...]
    ops: tuple[str, ...] = SUMS
    gives: tuple[tuple[str, str], ...] = ()
    unread: bool = False
    converts: bool = True
    real: bool = False

    def result(self, op: str) -> str:
        """The pending reduction of the outputs, if ``op`` is that of the operands."""
        return dict(self.gives).get(op, op)


@dataclass(frozen=True)
class Factors:
    """The result of a rule for a ``Call``.

    Args:
        operands: per tensor operand, per dim, its factors from outermost to innermost; () for a dim without factors.
        outputs: the same per output; None for an output that is not a tensor.
        reduce: factor -> the reduction left pending in outputs without it ("sum" by default); None: then it cannot be sharded.
        replicated: factors that must stay whole.
        linear: groups of operands through which a pending reduction passes.
        additive: operands that are added to the output: Partial where the output is Partial.
        depends: per output, the operands it depends on; None for all.
        enforce: pairs (operand, output) that share memory, and so their layout.
        together: pairs of factors that one axis of the mesh may shard together; the local form then communicates, so an operator alone on
            its shards does not give the result.
        on_experts: placements of (operands, outputs) on an axis whose ranks hold the rows of their own experts.
        sizes: sizes of factors that do not follow from the shapes.
        filled: whether no shard may be empty, because torch's kernel takes no tensor without elements.
        note: for people, why the operator has no more shardings.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    reduce: Mapping[str, str | None] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    linear: tuple[Linear, ...] = ()
    additive: tuple[int, ...] = ()
    depends: tuple[tuple[int, ...], ...] | None = None
    enforce: tuple[tuple[int, int], ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    on_experts: tuple[tuple[Placement, ...], tuple[Placement, ...]] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    filled: bool = False
    note: str = ""

    def __str__(self) -> str:
        return f"{self._side(self.operands)} -> {self._side(self.outputs)}"

    def _side(self, tensors: Iterable[Dims | None]) -> str:
        return ", ".join("-" if dims is None else " ".join(map(self._dim, dims)) for dims in tensors)

    def _dim(self, dim: Dim) -> str:
        names = [f"{f}!" if f in self.replicated else f for f in dim]
        return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"


Rule = Callable[[Call], Factors]


def factors(operands: Iterable[Iterable[Name]], outputs: Iterable[Iterable[Name] | None], **properties: Any) -> Factors:
    """``Factors`` from names: ``"b"``, ``"h!"`` (must stay whole), ``("a", "b")`` (composite), ``""`` (no factor)."""
    replicated: set[str] = set()
    ins = tuple(_dims(tensor, replicated) for tensor in operands)
    outs = tuple(None if tensor is None else _dims(tensor, replicated) for tensor in outputs)
    return Factors(ins, outs, replicated=frozenset(replicated), **properties)


def _dims(tensor: Iterable[Name], replicated: set[str]) -> Dims:
    return tuple(_dim((name,) if isinstance(name, str) else name, replicated) for name in tensor)


def _dim(names: Sequence[str], replicated: set[str]) -> Dim:
    replicated.update(n[:-1] for n in names if n.endswith("!"))
    return tuple(n.removesuffix("!") for n in names if n)


def replicate_all(call: Call, note: str = "") -> Factors:
    """Factors that allow only replication; ``note`` says why."""
    operands = [[""] * meta.ndim for meta in call.operands]
    return factors(operands, [None if o is None else [""] * o.ndim for o in call.outputs], note=note)


def linear_groups(call: Call, groups: Iterable[Sequence[int]], ops: tuple[str, ...] = SUMS, **properties: Any) -> tuple[Linear, ...]:
    """``Linear`` groups from groups of argument positions; ``properties``: further fields of ``Linear``.

    Arguments that are None are left out. A scalar in a group is equal on all ranks, so only idempotent reductions pass, not sums.
    """
    found = (_members(call, group) for group in groups)
    pairs = ((members, tuple(op for op in ops if plain or op in IDEMPOTENT)) for members, plain in found)
    return tuple(Linear(members, kept, **properties) for members, kept in pairs if members and kept)


def _members(call: Call, group: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Operands in a group, and whether the group has no scalars."""
    members: list[int] = []
    plain = True
    for value in map(call.arg, group):
        entries = value if isinstance(value, tuple) else (value,)
        members += [e.index for e in entries if isinstance(e, Operand)]
        plain = plain and all(isinstance(e, Operand) or e is None for e in entries)
    return tuple(members), plain


def resolve(rule: Factors, call: Call) -> tuple[Factors, dict[str, Any]]:
    """The rule without factors of size 1, and the size of every factor; raises RuleError if the shapes do not fit."""
    tensors = _paired(rule, call)
    sizes: dict[str, Any] = dict(rule.sizes)
    for dims, meta in tensors:
        for dim, size in zip(dims, meta.shape, strict=True):
            if len(dim) == 1 and not is_one(size):
                _agree(sizes, dim[0], size, rule, call)
    _solve_composites(tensors, sizes, rule, call)
    ins = tuple(_without_ones(d, m, sizes) for d, m in zip(rule.operands, call.operands, strict=True))
    outs = tuple(None if d is None or m is None else _without_ones(d, m, sizes) for d, m in zip(rule.outputs, call.outputs, strict=True))
    properties = {k: v for k, v in vars(rule).items() if k not in ("operands", "outputs")}
    return Factors(ins, outs, **properties), sizes


def _paired(rule: Factors, call: Call) -> list[tuple[Dims, TensorMeta]]:
    if len(rule.operands) != len(call.operands) or len(rule.outputs) != len(call.outputs):
        raise _misfit(rule, call, f"{len(call.operands)} operands and {len(call.outputs)} outputs were given")
    pairs = [*zip(rule.operands, call.operands, strict=True), *zip(rule.outputs, call.outputs, strict=True)]
    tensors = [(dims, meta) for dims, meta in pairs if dims is not None and meta is not None]
    for dims, meta in tensors:
        if len(dims) != meta.ndim:
            raise _misfit(rule, call, f"{len(dims)} dims are named for a tensor of shape {list(meta.shape)}")
    return tensors


def _solve_composites(tensors: list[tuple[Dims, TensorMeta]], sizes: dict[str, Any], rule: Factors, call: Call) -> None:
    """Adds the sizes of factors of composite dims: a dim with one unknown factor determines it; those still unknown are 1."""
    composites = [(d, s) for dims, m in tensors for d, s in zip(dims, m.shape, strict=True) if len(d) > 1]
    for dim, size in composites:
        unknown = [f for f in dim if f not in sizes]
        known = math.prod(sizes[f] for f in dim if f in sizes)
        if len(unknown) == 1 and not known_equal(known, 0):
            sizes[unknown[0]] = size // known
    for dims, _ in tensors:
        for f in (f for dim in dims for f in dim):
            sizes.setdefault(f, 1)
    for dim, size in composites:
        if not is_one(size) and not known_equal(math.prod(sizes[f] for f in dim), size):
            raise _misfit(rule, call, f"({' '.join(dim)}) is {' x '.join(str(sizes[f]) for f in dim)}, the dim has {size}")


def _agree(sizes: dict[str, Any], factor: str, size: Any, rule: Factors, call: Call) -> None:
    if not known_equal(sizes.setdefault(factor, size), size):
        raise _misfit(rule, call, f"factor {factor!r} is both {sizes[factor]} and {size}")


def _without_ones(dims: Dims, meta: TensorMeta, sizes: dict[str, Any]) -> Dims:
    pairs = zip(dims, meta.shape, strict=True)
    return tuple(() if is_one(size) else tuple(f for f in dim if not is_one(sizes[f])) for dim, size in pairs)


def _misfit(rule: Factors, call: Call, what: str) -> RuleError:
    return RuleError(
        f"rule '{rule}' does not fit {call.op}({shapes_str(call.operands)}) -> {shapes_str(call.outputs)}: {what}",
        remedy="correct the rule of this operator, or report it if it is one of fxshard's",
    )


def shapes_str(metas: Iterable[TensorMeta | None]) -> str:
    return ", ".join("None" if m is None else str(list(m.shape)) for m in metas)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1, without adding a guard on symbolic ones."""
    return known_equal(size, 1)


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without adding a guard on symbolic ones."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return surely(a == b)
