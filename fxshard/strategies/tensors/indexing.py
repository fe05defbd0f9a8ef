"""Reading and writing at positions given by tensors: indexed dims stay whole, dims of the index can be sharded.

Accumulation (scatter_add, index_add, accumulating index_put) with a sharded index leaves a pending sum; the tensor that it adds
to must then be a pending sum too.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.factors import (
    EXTREMA,
    IDEMPOTENT,
    MOVEMENT,
    SUMS,
    Factors,
    factors,
    known_equal,
    linear_groups,
    replicate_all,
)
from fxshard.strategies.engine.local import on_contiguous
from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.dims import named
from fxshard.strategies.tensors.pointwise import aten_names


def index_select(call: Call) -> Factors:
    """out[.., i, ..] = x[.., index[i], ..]."""
    dims, index, part = _at_index(call, "k")
    return factors([dims, index], [part], linear=linear_groups(call, [(0,)], MOVEMENT))


def _at_index(call: Call, k: str) -> tuple[list[str], list[str], list[str]]:
    """Names of x, of a vector of indices of a dim of x, and of the part of x at these indices; ``k``: the name of the vector's dim."""
    dim = call.arg(1) % max(call.operands[0].ndim, 1)
    dims = named(call.operands[0].ndim, [dim])
    return dims, [k][: call.operands[1].ndim], [k if d == dim else n for d, n in enumerate(dims)]


def index_add(call: Call) -> Factors:
    """out[.., index[i], ..] += source[.., i, ..]."""
    dims, index, source = _at_index(call, "k")
    return factors([dims, index, source], [dims], linear=linear_groups(call, [(0, 3)]), additive=(0,))


def _aligned(call: Call, dim: int, along: str, *others: int) -> tuple[list[str], list[str]]:
    """Names of x and of the index: dims other than ``dim`` can be sharded if all sizes agree. ``along``: the index's name of ``dim``."""
    x, index = call.operands[0].shape, call.operands[1].shape
    free = [
        d != dim and known_equal(s, index[d]) and all(known_equal(s, call.operands[o].shape[d]) for o in others) for d, s in enumerate(x)
    ]
    whole = not all(known_equal(call.operands[o].shape[dim], index[dim]) for o in others) if x else False
    k = f"{along}!" if whole and not along.endswith("!") else along
    return (
        [f"d{d}" if f else f"x{d}!" for d, f in enumerate(free)],
        [f"d{d}" if f else k if d == dim else f"i{d}!" for d, f in enumerate(free)],
    )


def gather(call: Call) -> Factors:
    """out[i, j] = x[index[i, j], j]."""
    if call.operands[0].ndim != call.operands[1].ndim:
        return replicate_all(call)
    x, index = _aligned(call, call.arg(1) % max(call.operands[0].ndim, 1), "k")
    return factors([x, index], [index], linear=linear_groups(call, [(0,)], MOVEMENT))


def scatter(call: Call) -> Factors:
    """x with out[index[i, j], j] = src[i, j], or src added or otherwise reduced into it."""
    if any(o.ndim != call.operands[0].ndim for o in call.operands):
        return replicate_all(call)
    left = _accumulated(call)
    adds = left is not None
    others = range(2, len(call.operands))
    x, index = _aligned(call, call.arg(1) % max(call.operands[0].ndim, 1), "k" if adds else "k!", *others)
    src = [[n if n.startswith(("d", "k")) else f"s{d}!" for d, n in enumerate(index)] for _ in others]
    if not all(known_equal(a, b) for o in others for a, b in zip(call.operands[1].shape, call.operands[o].shape, strict=True)):
        src = [[n if n.startswith("d") else f"s{d}!" for d, n in enumerate(index)] for _ in others]
    return factors([x, index, *src], [x], linear=_scatter_groups(call), additive=(0,) if adds else (), reduce={"k": left} if left else {})


def _accumulated(call: Call) -> str | None:
    """The reduction that combines new and old values; None if new values replace old ones."""
    if call.op == "aten.scatter_add.default":
        return "sum"
    if call.op != "aten.scatter_reduce.two" or not dict(call.kwargs).get("include_self", True):
        return None
    return {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}.get(call.arg(4))


def _scatter_groups(call: Call) -> Any:
    if call.op == "aten.scatter_add.default":
        return (*linear_groups(call, [(0, 3)], SUMS), *linear_groups(call, [(0,)], EXTREMA, real=True))
    if call.op == "aten.scatter.src":
        return linear_groups(call, [(0, 3)], MOVEMENT)
    if call.op == "aten.scatter.value":
        return linear_groups(call, [(0,)], MOVEMENT if call.arg(3) == 0 else IDEMPOTENT)
    return _reduced_groups(call, call.arg(4)) if call.op == "aten.scatter_reduce.two" else ()


def _reduced_groups(call: Call, reduce: str) -> Any:
    """Sums and means are linear in (x, src) jointly, products multiplicative; a maximum or minimum passes itself and increases with x."""
    if reduce == "mean" and not is_inexact(call.operands[0].dtype):
        return ()
    if reduce in ("sum", "mean"):
        return (*linear_groups(call, [(0, 3)], SUMS), *linear_groups(call, [(0,)], EXTREMA, real=True))
    if reduce == "prod":
        return linear_groups(call, [(0, 3)], ("product",))
    same_extreme = linear_groups(call, [(0, 3)], (reduce.removeprefix("a"),))
    return (*same_extreme, *linear_groups(call, [(0,)], EXTREMA))


def _indexed(call: Call) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Names of the dims of x, of each index tensor, and of x[indices]; None for boolean indices."""
    x = call.operands[0]
    entries = [*call.arg(1), *(None for _ in range(x.ndim - len(call.arg(1))))]
    found = {d: call.operands[e.index] for d, e in enumerate(entries) if isinstance(e, Operand)}
    if any(o.dtype in (torch.bool, torch.uint8) for o in found.values()):
        return None
    dims = named(x.ndim, found)
    count = max((o.ndim for o in found.values()), default=0)
    index = named(count, prefix="b")
    places = sorted(found)
    together = places == list(range(places[0], places[-1] + 1)) if places else True
    first = places[0] if places and together else 0
    rest = [n for d, n in enumerate(dims) if d not in found]
    return dims, [index[count - o.ndim :] for o in found.values()], [*rest[:first], *index, *rest[first:]]


def index(call: Call) -> Factors:
    """out[b.., rest] = x[i(b), j(b), rest]."""
    named_dims = _indexed(call)
    if named_dims is None:
        return replicate_all(call, "the shape of its output depends on the values of a boolean index")
    dims, indices, outs = named_dims
    return factors([dims, *indices], [outs], linear=linear_groups(call, [(0,)], MOVEMENT))


def index_put(call: Call) -> Factors:
    """x with x[i(b), j(b), rest] = or += values[b.., rest], values broadcast."""
    named_dims = _indexed(call)
    if named_dims is None:
        return replicate_all(call, "a boolean index needs the whole tensor")
    dims, indices, outs = named_dims
    adds = bool(call.arg(3, "accumulate", False))
    values = outs[len(outs) - call.operands[-1].ndim :]
    left: dict[str, str | None] = {} if adds else {n: None for n in outs if n.startswith("b")}
    groups = linear_groups(call, [(0, 2)], SUMS if adds else MOVEMENT)
    return factors([dims, *indices, values], [dims], reduce=left, linear=groups, additive=(0,) if adds else ())


def searchsorted(call: Call) -> Factors:
    """Positions of x in sorted rows; rows stay whole. A single row serves all of x."""
    rows, x = call.operands[:2]
    dims = named(x.ndim)
    if len(call.operands) > 2:
        return replicate_all(call, "a sorter is not supported")
    return factors([[*dims[: rows.ndim - 1], "row!"], dims], [dims])


def index_fill(call: Call) -> Factors:
    """x with a value at some indices of a dim."""
    dims = named(call.operands[0].ndim, [call.arg(1) % max(call.operands[0].ndim, 1)])
    others = [["k!"] * o.ndim for o in call.operands[1:]]
    return factors([dims, *others], [dims])


def index_copy(call: Call) -> Factors:
    """out[.., index[i], ..] = source[.., i, ..]: with a sharded index, ranks would not know which elements to keep, so it stays whole."""
    dims, index, source = _at_index(call, "k!")
    return factors([dims, index, source], [dims], linear=linear_groups(call, [(0, 3)], MOVEMENT))


def take(call: Call) -> Factors:
    """out[i] = x.flatten()[index[i]]."""
    index = named(call.operands[1].ndim)
    return factors([[f"x{d}!" for d in range(call.operands[0].ndim)], index], [index], linear=linear_groups(call, [(0,)], MOVEMENT))


def isin(call: Call) -> Factors:
    """Whether each element is in the test set: in any of its shards (max) or, with ``invert``, in none (min)."""
    tensors = [o.ndim for o in call.operands]
    single = not isinstance(call.arg(0), Operand)
    elements = [] if single else named(tensors[0])
    test = named(tensors[-1], prefix="t") if isinstance(call.arg(1), Operand) else []
    how = "min" if call.arg(len(call.args), "invert", False) else "max"
    ins = [elements] * (not single) + [test] * isinstance(call.arg(1), Operand)
    return factors(ins, [elements], reduce=dict.fromkeys(test, how))


register(aten_names("isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor"), isin, local=on_contiguous(unchanged))
register(aten_names("index_fill.int_Scalar index_fill.int_Tensor"), index_fill)
register(aten_names("index_copy"), index_copy)
register(aten_names("take"), take)
register(aten_names("index_select"), index_select)
register(aten_names("index_add"), index_add)
register(aten_names("gather"), gather)
register(aten_names("scatter.src scatter.value scatter_add scatter_reduce.two scatter.reduce scatter.value_reduce"), scatter)
register(aten_names("index.Tensor _unsafe_index.Tensor"), index)
register(aten_names("index_put _unsafe_index_put"), index_put)
register(aten_names("bucketize.Tensor"), rule("..., _ -> ..."))
register(aten_names("searchsorted.Tensor"), searchsorted)
