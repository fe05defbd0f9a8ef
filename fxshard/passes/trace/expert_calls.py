"""Experts of transformers' mixtures, captured as rows that travel to experts and back (``fxshard.ops.experts``).

transformers picks the function that runs a module's experts by name, from a table to which programs may add. While a model is captured,
the entry ``grouped_mm`` is the one below: the same numbers, with rows in the order of tokens, so that each rank may keep those of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

TABLE = "transformers.integrations.moe"
ENTRY = "grouped_mm"


@contextlib.contextmanager
def expert_calls() -> Iterator[None]:
    """While Dynamo captures a model: replaces transformers' grouped products of experts, if transformers is loaded."""
    table: Any = getattr(sys.modules.get(TABLE), "ALL_EXPERTS_FUNCTIONS", None)
    given: Any = None if table is None or ENTRY not in table else table[ENTRY]
    if not str(getattr(given, "__module__", None)).startswith("transformers."):  # not loaded, or the user's own function
        yield
        return

    def replaced(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._is_expert_parallel:  # transformers' own sharding: ids are those of a rank, with marks for the others
            out: Tensor = given(self, hidden_states, top_k_index, top_k_weights)
            return out
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    table[ENTRY] = replaced
    try:
        yield
    finally:
        del table[ENTRY]
        if table.get(ENTRY) is not given:  # it was set before, not the table's own
            table[ENTRY] = given


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum [t, h] of the chosen experts, for tokens [t, h], ids [t, k] and weights [t, k]; ``self``: their module."""
    ops, chosen = torch.ops.fxshard, top_k_index.to(torch.int64)
    rows = hidden_states.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    rows, ids = ops.to_experts(rows, chosen, self.num_experts)
    if self.has_gate:
        rows = self._apply_gate(_product(self, "gate_up_proj", rows, ids))
    else:
        rows = self.act_fn(_product(self, "up_proj", rows, ids))
    rows = _product(self, "down_proj", rows, ids)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = ops.from_experts(rows, chosen, self.num_experts)
    return (rows * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _product(self: Any, name: str, rows: Tensor, ids: Tensor) -> Tensor:
    """The rows times the matrices of a projection, with its bias: the product of a column of ones and its vectors."""
    weight = getattr(self, name)
    out: Tensor = torch.ops.fxshard.expert_linear(rows.to(weight.dtype), weight if self.is_transposed else weight.transpose(-2, -1), ids)
    if self.has_bias:
        ones = (ids >= 0).to(weight.dtype).unsqueeze(-1)
        out = out + torch.ops.fxshard.expert_linear(ones, getattr(self, f"{name}_bias").unsqueeze(1), ids)
    return out
