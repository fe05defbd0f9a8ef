"""Blocks of attention, merged, are attention with a dense mask; what is not seen is not computed."""

from __future__ import annotations

import pytest
import torch

from fxshard.ops.sdpa.block_attention import merge_attention, parts

F = torch.nn.functional
block, backward = torch.ops.fxshard.block_attention, torch.ops.fxshard.block_attention_backward


def _truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int | None, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a dense mask; a query that sees nothing gives 0 and -inf."""
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (columns < keys) & (columns <= rows + offset if offset is not None else True)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.3).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


@pytest.mark.parametrize("offset", [None, -9, -5, -2, 0, 1, 3, 6, 7, 20])
@pytest.mark.parametrize("keys", [7, 4, 1, 0])
@pytest.mark.parametrize("rows", [5, 1, 0])
def test_a_block(offset: int | None, keys: int, rows: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in ((4, rows), (2, 7), (2, 7)))
    numbers = (None if offset is None else torch.tensor(offset), None, torch.tensor(keys), 0.3, True)
    out, lse = block(q.detach(), k.detach(), v.detach(), *numbers)
    want, want_lse = _truth(q, k, v, offset, keys)
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(out)
    found = backward(grad, q.detach(), k.detach(), v.detach(), out, lse, *numbers)
    for mine, theirs in zip(found, torch.autograd.grad(want, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_merged_blocks_are_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64).to(dtype) for _ in range(3))
    found = None
    for start in (0, 3, 5):
        piece = slice(start, {0: 3, 3: 5, 5: 6}[start])
        part = block(q, k[:, :, piece], v[:, :, piece], torch.tensor(-start), None, None, None, False)
        found = part if found is None else merge_attention(*found, *part)
    assert found is not None
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(found[0].double(), want, rtol=close, atol=close)


@pytest.mark.parametrize(("rows", "keys", "offset"), [(4, 4, 0), (4, 16, 12), (4, 16, 4), (4, 4, 4), (4, 4, -4), (3, 4, -2), (4, 2, 1)])
def test_only_what_is_seen_is_computed(rows: int, keys: int, offset: int) -> None:
    seen = sum(j <= i + offset for i in range(rows) for j in range(keys))
    computed = 0
    for part in parts(rows, keys, offset):
        height, width = rows - part.row, part.stop - part.start
        computed += sum(j <= i for i in range(height) for j in range(width)) if part.causal else height * width
    assert computed == seen
