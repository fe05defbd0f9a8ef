"""Weight norm: w = g v / |v|, with the norm over all dims but one, the only one that can be sharded."""

from __future__ import annotations

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, Name, factors, linear_groups
from fxshard.strategies.engine.local import on_contiguous
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.dims import named


def _dims(call: Call, v: int, dim: int) -> tuple[list[Name], list[Name]]:
    """Dims of v, and of tensors with one element per index of ``dim``."""
    ndim = call.operands[v].ndim
    kept = dim % ndim
    full = [n if d == kept else f"{n}!" for d, n in enumerate(named(ndim))]
    return list(full), [n if d == kept else "" for d, n in enumerate(full)]


def forward(call: Call) -> Factors:
    """(v, g, dim) -> (w, norms)."""
    v, g = _dims(call, 0, call.arg(2, "dim", 0))
    return factors([v, g], [v, g])


def backward(call: Call) -> Factors:
    """(dw, v, g, norms, dim) -> (dv, dg): linear in dw."""
    v, g = _dims(call, 1, call.arg(4))
    return factors([v, v, g, g], [v, g], linear=linear_groups(call, [(0,)]))


register("aten._weight_norm_interface.default", forward, local=on_contiguous(unchanged))
register("aten._weight_norm_interface_backward.default", backward, local=on_contiguous(unchanged))
