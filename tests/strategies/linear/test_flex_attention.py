"""flex_attention with functions for mask and scores, sharded by batch, by (grouped) heads, and by queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxshard.ops.flex import attention
from tests.ops.flex.test_functions import text
from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh

B, H, S, T, D, E = 2, 4, 5, 6, 4, 3
IDENTITY = text(lambda s, b, h, q, k: s, of_score=True)
BIASED = text(lambda s, b, h, q, k, slopes: s + slopes[h] * (q - k) * (b + 1), real(H), of_score=True)
MASK = text(lambda b, h, q, k, documents: (documents[b, q] == documents[b, k]) | (q > k + h), torch.zeros(B, T, dtype=torch.int64))
FULL = text(lambda b, h, q, k: q.new_ones((), dtype=torch.bool))
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])


def _qkv(kv_heads: int) -> tuple[torch.Tensor, ...]:
    return real(B, H, S, D), real(B, kv_heads, T, D), real(B, kv_heads, T, E)


def _mods(biased: bool) -> tuple[Any, ...]:
    return [real(H)] if biased else [], [DOCUMENTS], None, None, None, BIASED if biased else IDENTITY, MASK, 0.3


def _backward(q: Any, k: Any, v: Any, mods: tuple[Any, ...], of_lse: bool) -> set[str]:
    out, lse, _ = torch.ops.fxshard.flex_attention(q, k, v, *mods)
    wanted = [0] if mods[0] else []
    return check("fxshard.flex_attention_backward.default", out * 2 + 1, lse * 3 if of_lse else None, q, k, v, out, lse, *mods, wanted)


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_forward(kv_heads: int, biased: bool) -> None:
    specs = check("fxshard.flex_attention.default", *_qkv(kv_heads), *_mods(biased))
    whole = ", R" * (2 if biased else 1)
    heads = "R, R" if kv_heads == 1 else "S(1), S(1)"
    wanted = (
        (f"S(0), S(0), S(0){whole}", "S(0), S(0), S(0)"),
        (f"S(1), {heads}{whole}", "S(1), S(1), S(1)"),
        (f"S(2), R, R{whole}", "S(2), S(2), S(2)"),
    )
    assert {f"{reads} -> {gives}" for reads, gives in wanted} <= specs


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("of_lse", [False, True])
def test_backward(kv_heads: int, of_lse: bool) -> None:
    specs = _backward(*_qkv(kv_heads), _mods(True), of_lse)
    rows = "S(2), S(2), S(2)" if of_lse else "S(2), S(2)"
    assert f"{rows}, R, R, S(2), S(2), R, R -> S(2), P, P, P" in specs
    assert f"{'P, P' if of_lse else 'P'}{', R' * 7} -> P, P, P, P" in specs


def test_two_axes() -> None:
    specs = {str(s) for s in check_mesh("fxshard.flex_attention.default", (*_qkv(2), *_mods(True)), mesh=(2, 2))}
    assert {
        "S(1)S(2), S(1)R, S(1)R, RR, RR -> S(1)S(2), S(1)S(2), S(1)S(2)",
        "S(2)S(2), RR, RR, RR, RR -> S(2)S(2), S(2)S(2), S(2)S(2)",
    } <= specs


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_blocks_of_queries(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on how many queries are computed at once."""
    q, k, v = _qkv(2)
    mods = _mods(True)
    results: list[Callable[[], Any]] = []
    for size in (attention.ROWS, rows):
        monkeypatch.setattr(attention, "_rows", lambda q, k, size=size: size)
        out, lse, most = torch.ops.fxshard.flex_attention(q, k, v, *mods)
        results.append((out, lse, most, torch.ops.fxshard.flex_attention_backward(out + 1, lse, q, k, v, out, lse, *mods, [0])))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_autograd() -> None:
    q, k, v, slopes = (t.clone().requires_grad_() for t in (*_qkv(2), real(H)))

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.fxshard.flex_attention(*given[:3], [given[3]], *_mods(True)[1:])[:2]

    assert torch.autograd.gradcheck(run, (q, k, v, slopes), check_batched_grad=False)
