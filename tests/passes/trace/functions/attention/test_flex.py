"""flex_attention, traced and sharded, equals dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import SQUARE, TWO, input_gradients, real, simulated

B, H, S, D = 2, 4, 6, 4
DOCUMENT = torch.tensor([0, 0, 1, 1, 1, 2])
ROW, COLUMN = torch.arange(S)[:, None], torch.arange(S)
MASKS: dict[str, tuple[Any, Any]] = {
    "causal": (lambda b, h, q, k: q >= k, ROW >= COLUMN),
    "window": (lambda b, h, q, k: (q - k).abs() < 2, (ROW - COLUMN).abs() < 2),
    "document": (lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], DOCUMENT[:, None] == DOCUMENT),
    "no key": (lambda b, h, q, k: q > k, ROW > COLUMN),
}


class Attends(nn.Module):
    """flex_attention, or (``dense``) the same in single operators."""

    def __init__(self, mask: str | None, biased: bool, dense: bool) -> None:
        super().__init__()
        self.register_buffer("slope", torch.linspace(0.1, 0.7, H, dtype=torch.float64))
        self.mask, self.biased, self.dense = mask, biased, dense
        self.blocks = None if mask is None else create_block_mask(MASKS[mask][0], None, None, S, S, device="cpu")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.dense:
            mod = (lambda x, b, h, i, j: x + self.slope[h] * (j - i)) if self.biased else None
            return flex_attention(q, k, v, score_mod=mod, block_mask=self.blocks, scale=0.3, enable_gqa=True)
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * 0.3
        if self.biased:
            scores = scores + self.slope[:, None, None] * (COLUMN - ROW)
        if self.mask is None:
            return scores.softmax(-1) @ v
        kept = MASKS[self.mask][1]
        weights = scores.masked_fill(~kept, -1e30).softmax(-1) * kept
        return weights @ v


CASES = [("causal", True, H), ("window", False, 2), ("document", True, 2), ("no key", False, H), (None, True, H)]


@pytest.mark.parametrize(("mask", "biased", "heads"), CASES)
def test_it_equals_dense_attention(mask: str | None, biased: bool, heads: int) -> None:
    args = (real(B, H, S, D), real(B, heads, S, D, seed=1), real(B, heads, S, D, seed=2))
    model, dense = Attends(mask, biased, False), Attends(mask, biased, True)
    graph = trace(model, args)
    wanted = input_gradients(dense, args)
    assert len(wanted) == 3
    for plan, mesh in enumerate((TWO, SQUARE)):
        result = simulated(graph, mesh, model, args, plan=plan)
        torch.testing.assert_close(torch.utils._pytree.tree_leaves(result.outputs)[0], dense(*args), rtol=1e-9, atol=1e-12)
        for name, grad in wanted.items():
            torch.testing.assert_close(result.grads[name], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "biased", "name"),
    [
        ("causal", False, "fxshard.sdpa"),
        (None, False, "fxshard.sdpa"),
        ("causal", True, "fxshard.flex_attention"),
        ("window", False, "fxshard.flex_attention"),
        ("no key", False, "fxshard.flex_attention"),
    ],
)
def test_it_is_one_node_each_way(mask: str | None, biased: bool, name: str) -> None:
    """Which has no scores in memory; if the mask is causal or absent, keys can be sharded too."""
    args = (real(B, H, S, D), real(B, 2, S, D, seed=1), real(B, 2, S, D, seed=2))
    model = Attends(mask, biased, False)
    graph = trace(model, args)
    names = [str(n.target) for n in graph.module.graph.nodes]
    assert {n for n in names if "attention" in n or "sdpa" in n} == {f"{name}.default", f"{name}_backward.default"}
    assert not any("softmax" in n or "where" in n for n in names)
    assert not annotate(graph, TWO).fallbacks
    result = simulated(graph, TWO, model, args, plan=3)
    wanted = Attends(mask, biased, True)(*args)
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(result.outputs)[0], wanted, rtol=1e-9, atol=1e-12)


def test_a_mask_written_the_other_way_round() -> None:
    args = (real(B, H, S, D), real(B, H, S, D, seed=1), real(B, H, S, D, seed=2))
    for function, causal in ((lambda b, h, q, k: k <= q, True), (lambda b, h, q, k: q <= k, False), (lambda b, h, q, k: k >= q, False)):
        model = Attends(None, False, False)
        model.blocks = create_block_mask(function, None, None, S, S, device="cpu")
        graph = trace(model, args)
        assert ("fxshard.sdpa.default" in [str(n.target) for n in graph.module.graph.nodes]) == causal


class ByLists(nn.Module):
    """A block mask of 2 x 2 blocks without a function: the first block of queries reads the first of keys, the second both."""

    def __init__(self, size: int, **mask: Any) -> None:
        super().__init__()
        counts, numbers = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
        self.blocks = BlockMask.from_kv_blocks(counts, numbers, BLOCK_SIZE=size, **mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=self.blocks)


def test_lists_without_a_function_are_refused() -> None:
    """They would be full attention otherwise; with a function that says the same, it is used."""
    args = tuple(real(1, 1, 32, D, seed=seed) for seed in range(3))
    with pytest.raises(TraceError, match="a block mask of lists without a function"):
        trace(ByLists(16), args)
    trace(ByLists(16, mask_mod=lambda b, h, q, k: q // 16 >= k // 16), args)
