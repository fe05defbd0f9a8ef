"""Attention sharded by batch, by (grouped) heads, and by queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real, yes_no
from tests.strategies.shards import check, check_mesh

B, H, K, S, T, D = 3, 8, 4, 5, 6, 4


def _qkv(kv_heads: int, keys: int) -> tuple[torch.Tensor, ...]:
    return real(B, H, S, D), real(B, kv_heads, keys, D), real(B, kv_heads, keys, D) * 0.5


def _backward(q: Any, k: Any, v: Any, *rest: Any) -> set[str]:
    out, lse = torch.ops.fxshard.sdpa(q, k, v, *rest)
    return check("fxshard.sdpa_backward.default", out * 2 + 1, q, k, v, out, lse, *rest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention(causal: bool, grouped: bool) -> None:
    q, k, v = _qkv(K if grouped else H, T)
    rest = (None, causal, None, grouped)
    specs = check("fxshard.sdpa.default", q, k, v, *rest)
    assert {"S(0), S(0), S(0) -> S(0), S(0)", "S(1), S(1), S(1) -> S(1), S(1)"} <= specs
    assert "S(2), R, R -> S(2), S(2)" in specs
    specs = _backward(q, k, v, *rest)
    assert "P, R, R, R, R, R -> P, P, P" in specs
    assert "S(2), S(2), R, R, S(2), S(2) -> S(2), P, P" in specs


@pytest.mark.parametrize("keys", [1, 3, S, 9])
def test_causal_queries_shard_with_any_number_of_keys(keys: int) -> None:
    """Query i attends to keys up to i, both counted from the start."""
    q, k, v = _qkv(H, keys)
    assert "S(2), R, R -> S(2), S(2)" in check("fxshard.sdpa.default", q, k, v, None, True, 0.3, False)
    _backward(q, k, v, None, True, 0.3, False)


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_of_keys_for_all(causal: bool) -> None:
    """Multi-query attention: heads of q can be sharded, and gradients of the one key head are sums over them."""
    q, k, v = _qkv(1, T)
    rest = (None, causal, None, True)
    assert "S(1), R, R -> S(1), S(1)" in check("fxshard.sdpa.default", q, k, v, *rest)
    assert "S(1), S(1), R, R, S(1), S(1) -> S(1), P, P" in _backward(q, k, v, *rest)


@pytest.mark.parametrize("shape", [(B, H, S, T), (1, 1, S, T), (B, 1, 1, T), (S, T)])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_broadcast(shape: tuple[int, ...], boolean: bool) -> None:
    mask = yes_no(*shape).index_fill(-1, torch.tensor([0]), True) if boolean else real(*shape)
    q, k, v = _qkv(H, T)
    if len(shape) == 2:
        mask = mask[None, None]
    check("fxshard.sdpa.default", q, k, v, mask, False, 0.3, False)
    _backward(q, k, v, mask, False, 0.3, False)


def test_grouped_heads_shard_between_groups_only() -> None:
    q, k, v = _qkv(K, T)
    specs = {str(s) for s in check_mesh("fxshard.sdpa.default", (q, k, v, None, False, None, True), mesh=(3,))}
    assert "S(1), S(1), S(1) -> S(1), S(1)" not in specs, "4 groups over 3 ranks: 2 2 0 groups, but 8 heads: 3 3 2"


def test_causal_attention_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("fxshard.sdpa.default", (*_qkv(H, T), None, True, None, False), mesh=(2, 2))}
    assert {"S(1)S(2), S(1)R, S(1)R -> S(1)S(2), S(1)S(2)", "S(2)S(2), RR, RR -> S(2)S(2), S(2)S(2)"} <= specs


def test_attention_on_a_mesh() -> None:
    q, k, v = _qkv(K, T)
    specs = {str(s) for s in check_mesh("fxshard.sdpa.default", (q, k, v, None, False, None, True), mesh=(2, 2))}
    assert "S(0)S(1), S(0)S(1), S(0)S(1) -> S(0)S(1), S(0)S(1)" in specs
