"""varlen_attn is one node each way, whose heads are sharded; on the CPU it equals attention within each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import SQUARE, THREE, TWO, Function, input_gradients, real, simulated, targets
from tests.slices import diagonal

H, D = 6, 4
QUERIES, KEYS = (3, 0, 5, 1), (4, 2, 5, 3)
NODES = {"fxshard.varlen_attention.default", "fxshard.varlen_attention_backward.default"}


def _bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _inputs(kv_heads: int) -> tuple[Tensor, ...]:
    queries, keys = real(sum(QUERIES), H, D), (real(sum(KEYS), kv_heads, D, seed=seed) for seed in (1, 2))
    return (queries, *keys, _bounds(QUERIES), _bounds(KEYS))


def _model(window: tuple[int, int], **options: Any) -> Function:
    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None = None) -> Any:
        return varlen_attn(q, k, v, cu_q, cu_k, max(QUERIES), max(KEYS), window_size=window, enable_gqa=True, seqused_k=used, **options)

    return Function(attend)


def _dense(window: tuple[int, int]) -> Function:
    """The last query of a sequence is at the place of its last key."""

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Tensor:
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
        parts = []
        for one, keys, values in zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True):
            after = torch.arange(len(keys)) - torch.arange(len(one))[:, None] - (len(keys) - len(one))
            kept = (after <= (window[1] if window[1] >= 0 else 99)) & (-after <= (window[0] if window[0] >= 0 else 99))
            scores = (torch.einsum("shd,thd->hst", one, keys) * D**-0.5).masked_fill(~kept, -torch.inf)
            parts.append(torch.einsum("hst,thd->shd", scores.softmax(-1), values))
        return torch.cat(parts)

    return Function(attend)


@pytest.mark.parametrize(("window", "kv_heads"), diagonal([(-1, -1), (-1, 0), (1, 0), (1, 2)], [H, 2, 1]))
def test_it_equals_attention_in_each_sequence(window: tuple[int, int], kv_heads: int) -> None:
    args, model, dense = _inputs(kv_heads), _model(window), _dense(window)
    graph = trace(model, args)
    assert targets(graph) >= NODES
    assert not annotate(graph, TWO).fallbacks
    wanted = input_gradients(dense, args)
    for plan, mesh in enumerate((TWO, SQUARE, THREE)):
        result = simulated(graph, mesh, model, args, plan=plan)
        torch.testing.assert_close(torch.utils._pytree.tree_leaves(result.outputs)[0], dense(*args), rtol=1e-9, atol=1e-12)
        for name, grad in wanted.items():
            torch.testing.assert_close(result.grads[name], grad, rtol=1e-9, atol=1e-12)


def test_heads_are_sharded() -> None:
    graph = trace(_model((-1, 0)), _inputs(2))
    annotated = annotate(graph, TWO)
    for node in graph.module.graph.nodes:
        if str(node.target) in NODES:
            assert {str(spec.outputs[0]) for spec in annotated.specs[node.name]} >= {"S(1)", "R"}, node.name


def test_keys_in_use_and_tokens_after_the_last_sequence() -> None:
    q, k, v, cu_q, cu_k = _inputs(2)
    args = (*(torch.cat([t, t[:2]]).detach() for t in (q, k, v)), cu_q, cu_k, torch.tensor([4, 1, 3, 3], dtype=torch.int32))
    result = simulated(trace(_model((-1, -1)), args, train=False), TWO, _model((-1, -1)), args)
    found = torch.utils._pytree.tree_leaves(result.outputs)[0]
    wanted = _dense((-1, -1))(q, k, v)
    torch.testing.assert_close(found[:3], wanted[:3].detach(), rtol=1e-9, atol=1e-12)
    three = (torch.einsum("shd,thd->hst", q[3:8], k[6:9].repeat_interleave(3, 1)) * D**-0.5).softmax(-1)
    torch.testing.assert_close(found[3:8], torch.einsum("hst,thd->shd", three, v[6:9].repeat_interleave(3, 1)), rtol=1e-9, atol=1e-12)
    assert found[9:].eq(0).all()


def test_what_is_not_planned_is_refused() -> None:
    args = (*_inputs(2), torch.tensor([4, 1, 3, 3], dtype=torch.int32))
    with pytest.raises(TraceError, match="seqused_k is an inference-only"):
        trace(_model((-1, -1)), args)
    paged = _model((-1, -1), block_table=torch.zeros(4, 1, dtype=torch.int32))
    pages = real(2, 8, 2, D, grad=False)
    with pytest.raises(TraceError, match="paged cache"):
        trace(paged, (args[0].detach(), pages, pages, *args[3:]), train=False)


def test_the_logsumexp() -> None:
    args = tuple(t.detach() for t in _inputs(2))
    model = _model((-1, -1), return_aux=AuxRequest(lse=True))
    lse = torch.utils._pytree.tree_leaves(simulated(trace(model, args, train=False), TWO, model, args).outputs)[1]
    scores = torch.einsum("shd,thd->hst", args[0][:3], args[1][:4].repeat_interleave(3, 1)) * D**-0.5
    torch.testing.assert_close(lse[:, :3], scores.logsumexp(-1), rtol=1e-9, atol=1e-12)


def _jagged(_: Any, x: Tensor, bounds: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, bounds).sum(1)


def _nested_attention(_: Any, x: Tensor, bounds: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, bounds, max_seqlen=5, min_seqlen=0).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).values()


@pytest.mark.parametrize("function", [_jagged, _nested_attention])
def test_nested_tensors_name_this_as_the_remedy(function: Any) -> None:
    with pytest.raises(TraceError) as error:
        trace(Function(function), (real(sum(QUERIES), H, D), _bounds(QUERIES).long()))
    assert error.value.remedy is not None and "varlen_attn" in error.value.remedy
