"""Uses the sharding functions that users registered with ``torch.distributed.tensor.experimental.register_sharding``.

Such a function lists the options of one mesh axis, as (placements of the outputs, placements of the arguments). It does not say
what to do with sizes that the mesh does not divide: shards are then cut as by ``torch.chunk``, each rank runs the operator on its
shards, and an empty shard gives the identity element; this needs all sharded dims to be cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dtensor.rules import dtensor_spec, sharding_functions
from fxshard.errors import RuleError
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.layout.layouts import REDUCE_OPS
from fxshard.strategies.engine.factors import shapes_str

Option = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of all operands, and of all outputs, on one axis."""


def options_from(call: Call, function: Any) -> list[Option]:
    """The options that ``function`` lists for ``call``; raises RuleError for placements that do not fit its tensors."""
    specs = [dtensor_spec(meta.shape, meta.dtype) for meta in call.operands]
    args, kwargs = pytree.tree_map(lambda a: specs[a.index] if isinstance(a, Operand) else a, (call.args, dict(call.kwargs)))
    try:
        listed = [(list(outputs), list(inputs)) for outputs, inputs in function(*args, **kwargs)]
    except Exception as error:
        raise _fault(call, f"raises {type(error).__name__}: {error}") from error
    return [(_inputs(call, inputs), _outputs(call, outputs)) for outputs, inputs in listed]


def sharding_function(op: str) -> Any:
    """The function registered for an operator (``"mylib.op.default"``), or None."""
    return sharding_functions().get(op)


def _inputs(call: Call, placements: Sequence[Placement | None]) -> tuple[Placement, ...]:
    """The placements of tensor arguments; other arguments have None."""
    kept = tuple(p for p in placements if p is not None)
    if len(kept) != len(call.operands):
        raise _fault(call, f"places {len(kept)} arguments where {len(call.operands)} are tensors")
    return _checked(call, kept, call.operands)


def _outputs(call: Call, placements: Sequence[Placement | None]) -> tuple[Placement, ...]:
    if len(placements) != len(call.outputs):
        raise _fault(call, f"places {len(placements)} results, there are {len(call.outputs)}")
    return _checked(call, tuple(Replicate() if p is None else p for p in placements), call.outputs)


def _checked(call: Call, placements: tuple[Placement, ...], metas: Iterable[TensorMeta | None]) -> tuple[Placement, ...]:
    return tuple(_checked_placement(call, p, 0 if meta is None else meta.ndim) for p, meta in zip(placements, metas, strict=True))


def _checked_placement(call: Call, placement: Placement, ndim: int) -> Placement:
    """``placement`` of a tensor of ``ndim`` dims with a non-negative dim; raises RuleError for unsupported ones."""
    kind = type(placement)  # not isinstance: torch's subclasses (strided shards, masked sums) mean other layouts
    if kind is Shard and -ndim <= placement.dim < ndim:
        return Shard(placement.dim % ndim)
    if kind is Shard:
        raise _fault(call, f"offers {placement} for a tensor of {ndim} dims")
    if kind is not Replicate and not (kind is Partial and placement.reduce_op in REDUCE_OPS):
        raise _fault(call, f"offers {placement}, which fxshard does not support")
    return placement


def _fault(call: Call, what: str) -> RuleError:
    return RuleError(
        f"the function that register_sharding has for {call.op} {what}; operands {shapes_str(call.operands)}",
        remedy="correct it, or give the operator a rule by fxshard.register_rule, which comes first",
    )
