"""The option of an operator on an axis whose ranks hold the rows of their own experts: tensors [t, j, ...] of j rows for each token t.

A rank has its rows in an order of its own, at the front of a buffer for all rows, of the shape of the whole tensor. An operator that treats
each row alike runs on the buffer; what it makes of the rest is not read. Others say how they run themselves (``Factors.on_experts``).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import EXPERTS, ROW_DIMS
from fxshard.strategies.engine.factors import Dims, Factors

NAME = "experts"
"""Of the option, in place of the sharded factor."""
TOKENS, MATRICES = "t", "e"
"""Factors of operators on rows of experts: the tokens, and the experts, which the axis already shards."""
ON_EXPERTS = Partial(EXPERTS)


def own_option(rule: Factors, sizes: dict[str, Any]) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
    """(inputs, outputs) of an operator that knows the experts; None if there is a single token."""
    few = isinstance(size := sizes.get(TOKENS, 1), int) and size < 2
    return None if few else rule.on_experts


def by_row(rule: Factors) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
    """The same for an operator that treats each row alike: its results have the factors of rows, as their leading dims; None for others."""
    tensors = [*rule.operands, *rule.outputs]
    first = next((dims for dims in rule.outputs if dims is not None), ())
    rows = first[: len(ROW_DIMS)]
    names = {name for dim in rows for name in dim}
    if len(rows) < len(ROW_DIMS) or not names or names & rule.replicated or any(len(dim) > 1 for dim in rows):
        return None
    has = [_has_rows(dims, rows, names) for dims in tensors]
    if None in has or not all(has[len(rule.operands) :]):
        return None
    placed = tuple(ON_EXPERTS if one else Replicate() for one in has)
    return placed[: len(rule.operands)], placed[len(rule.operands) :]


def _has_rows(dims: Dims | None, rows: Dims, names: set[str]) -> bool | None:
    """Whether a tensor's leading dims are the rows; None if it has their factors anywhere else."""
    found = dims or ()
    leads = found[: len(ROW_DIMS)] == rows
    others = found[len(ROW_DIMS) :] if leads else found
    return None if any(name in names for dim in others for name in dim) else leads
