"""Neutral operators: each form of matmul, contraction and attention becomes an operator of fxshard, and computes what eager torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxshard.passes.trace.trace import trace
from tests.passes.tracing import Function, check_eager, real, targets

SDPA = F.scaled_dot_product_attention
KEPT = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0], [1] * 7, [1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1]]).bool()
NOTHING_KEPT = KEPT.clone().index_fill_(0, torch.tensor(2), False)
PADDING = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7]).bool()[:, None, None, :]
Q, K = (2, 4, 5, 6), (2, 4, 7, 6)


def check(function: Callable[..., Any], *args: Any) -> set[str]:
    graph, _ = check_eager(Function(lambda self, *given: function(*given)), *args)
    return targets(graph)


MASKS = {
    "bool": KEPT,
    "bool of four dims": KEPT.expand(2, 1, 5, 7),
    "padding": PADDING,
    "row without keys": NOTHING_KEPT,
    "float": real(4, 5, 7, grad=False),
    "float per batch": real(2, 1, 1, 7, grad=False),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_with_a_mask_is_one_node(mask: torch.Tensor) -> None:
    found = check(lambda q, k, v, m: SDPA(q, k, v, attn_mask=m), real(*Q), real(*K), real(*K, seed=1), mask)
    assert {"fxshard.sdpa.default", "fxshard.sdpa_backward.default"} <= found


FORMS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = {
    "plain": (Q, K, {}),
    "causal": (Q, K, {"is_causal": True}),
    "scale": (Q, K, {"scale": 0.3}),
    "scale 0": (Q, K, {"scale": 0.0}),
    "grouped": (Q, (2, 2, 7, 6), {"enable_gqa": True}),
    "grouped, causal": (Q, (2, 2, 5, 6), {"enable_gqa": True, "is_causal": True}),
    "k and v for all heads": (Q, (2, 1, 7, 6), {}),
    "k and v for all of the batch": (Q, (1, 4, 7, 6), {}),
    "k and v for all heads of all of the batch, causal": (Q, (1, 1, 7, 6), {"is_causal": True}),
    "q for all of the batch": ((1, 4, 5, 6), K, {}),
    "grouped by one": (Q, K, {"enable_gqa": True}),
    "three dims": ((4, 5, 6), (4, 7, 6), {}),
    "three dims, causal": ((4, 5, 6), (4, 7, 6), {"is_causal": True}),
    "three dims, scale 0": ((4, 5, 6), (4, 7, 6), {"scale": 0.0}),
    "three dims, row without keys": ((4, 5, 6), (4, 7, 6), {"attn_mask": NOTHING_KEPT}),
    "three dims, mask of three dims": ((4, 5, 6), (4, 7, 6), {"attn_mask": real(4, 5, 7, grad=False)}),
    "two dims": ((5, 6), (7, 6), {}),
}


@pytest.mark.parametrize(("q", "k", "options"), FORMS.values(), ids=FORMS)
def test_attention_is_one_node(q: tuple[int, ...], k: tuple[int, ...], options: dict[str, Any]) -> None:
    found = check(lambda q, k, v: SDPA(q, k, v, **options), real(*q), real(*k), real(*k, seed=1))
    assert {"fxshard.sdpa.default", "fxshard.sdpa_backward.default"} <= found


OTHER_VALUES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "smaller": (K, (2, 4, 7, 3), {}),
    "larger, with a scale": (K, (2, 4, 7, 9), {"scale": 0.3}),
    "larger, causal": (K, (2, 4, 7, 9), {"is_causal": True}),
    "grouped": ((2, 2, 7, 6), (2, 2, 7, 3), {"enable_gqa": True}),
    "masked": (K, (2, 4, 7, 3), {"attn_mask": NOTHING_KEPT}),
    "three dims": ((4, 7, 6), (4, 7, 3), {}),
}


@pytest.mark.parametrize(("k", "v", "options"), OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_attention_with_values_of_another_size_is_one_node(k: tuple[int, ...], v: tuple[int, ...], options: dict[str, Any]) -> None:
    q: tuple[int, ...] = Q if len(k) == 4 else Q[1:]
    found = check(lambda q, k, v: SDPA(q, k, v, **options), real(*q), real(*k), real(*v, seed=1))
    assert {"fxshard.sdpa.default", "fxshard.sdpa_backward.default"} <= found


PLAIN: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "five dims": ((2, 1, 2, 5, 6), (2, 1, 2, 7, 6), (2, 1, 2, 7, 6), {}),
    "v for all heads": (Q, (2, 4, 7, 6), (2, 1, 7, 6), {}),
    "all dropped": (Q, K, K, {"dropout_p": 1.0}),
    "three dims, dropout": ((4, 5, 6), (4, 7, 6), (4, 7, 6), {"dropout_p": 1.0}),
}


@pytest.mark.parametrize(("q", "k", "v", "options"), PLAIN.values(), ids=PLAIN)
def test_attention_that_no_kernel_supports_becomes_contractions(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """The kernels do not check these shapes: with a broadcast batch they would read out of bounds."""
    found = check(lambda q, k, v: SDPA(q, k, v, **options), real(*q), real(*k), real(*v, seed=1))
    assert "fxshard.einsum.default" in found and "fxshard.sdpa.default" not in found


def test_a_learned_mask_has_a_gradient() -> None:
    found = check(lambda q, k, v, m: SDPA(q, k, v, m, 0.0, False), real(*Q), real(*K), real(*K, seed=1), real(4, 5, 7))
    assert "fxshard.sdpa.default" not in found


MATMULS = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5,)),
    ((5,), (2, 5, 3)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 6)),
    ((1, 4, 5), (3, 5, 6)),
    ((2, 4, 5), (1, 5, 6)),
    ((1, 4, 5), (1, 5, 6)),
    ((1, 1, 4, 5), (2, 3, 5, 6)),
    ((4, 1), (1, 5)),
    ((2, 3, 4, 5), (3, 5, 6)),
]


def test_matmul_of_any_ranks_is_a_contraction() -> None:
    def forward(*operands: torch.Tensor) -> Any:
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        return [x @ y for x, y in pairs], [torch.matmul(x, other=y) for x, y in pairs[:4]], [x.matmul(y) for x, y in pairs[-4:]]

    found = check(forward, *(real(*shape) for pair in MATMULS for shape in pair))
    assert "fxshard.einsum.default" in found and not any("mm" in name or "matmul" in name for name in found)


CONTRACTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm by keyword": (lambda x, y: torch.mm(x, mat2=y), ((4, 5), (5, 3))),
    "bmm by keyword": (lambda x, y: torch.bmm(x, mat2=y), ((2, 4, 5), (2, 5, 3))),
    "addmm": (lambda x, y, b: torch.addmm(b, x, y, beta=0.5, alpha=2), ((4, 5), (5, 3), (3,))),
    "baddbmm": (lambda x, y, b: torch.baddbmm(b, x, y), ((2, 4, 5), (2, 5, 3), (2, 4, 3))),
    "baddbmm by keyword": (lambda x, y, b: b.baddbmm(batch1=x, batch2=y), ((2, 4, 5), (2, 5, 3), (2, 4, 3))),
    "reversed": (lambda x, y: y.__rmatmul__(x), ((4, 5), (5, 3))),
    "linear": (lambda x, w: F.linear(x, w), ((2, 3, 5), (4, 5))),
    "linear of one dim": (lambda x, w, b: F.linear(x, w, b), ((5,), (4, 5), (4,))),
    "transposed": (lambda x, y: x.T @ y.mT, ((5, 4), (3, 5))),
    "einsum": (lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), ((2, 3, 4, 5), (2, 3, 6, 5))),
    "einsum to a number": (lambda x, y: torch.einsum("ij,ij->", x, y), ((4, 5), (4, 5))),
    "einsum, outer": (lambda x, y: torch.einsum("i,j->ij", x, y), ((4,), (5,))),
    "einsum, elementwise": (lambda x, y: torch.einsum("ij,ij->ij", x, y), ((4, 5), (4, 5))),
    "einsum with blanks": (lambda x, y: torch.einsum("aij , ajk -> aik", x, y), ((2, 4, 5), (2, 5, 3))),
    "einsum of a list": (lambda *xs: torch.einsum("ij,jk->ik", list(xs)), ((4, 5), (5, 3))),
    "einsum by numbers": (lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]), ((4, 5), (5, 3))),
}


@pytest.mark.parametrize(("function", "shapes"), CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_contractions(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    found = check(function, *(real(*s, seed=i) for i, s in enumerate(shapes)))
    assert "fxshard.einsum.default" in found and not any("mm" in name for name in found)


OTHERS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "diagonal": (lambda x: torch.einsum("ii->i", x), ((4, 4),)),
    "trace": (lambda x: torch.einsum("ii", x), ((4, 4),)),
    "transposition": (lambda x: torch.einsum("ij->ji", x), ((4, 5),)),
    "implicit result": (lambda x, y: torch.einsum("ij,jk", x, y), ((4, 5), (5, 3))),
    "ellipsis": (lambda x, y: torch.einsum("...ij,...jk->...ik", x, y), ((2, 4, 5), (2, 5, 3))),
    "three operands": (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), ((4, 5), (5, 3), (3, 2))),
    "a letter summed alone": (lambda x, y: torch.einsum("ij,kj->i", x, y), ((4, 5), (3, 5))),
    "broadcast letter": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), ((1, 4, 5), (2, 5, 3))),
    "repeated letter": (lambda x, y: torch.einsum("iij,jk->ik", x, y), ((4, 4, 5), (5, 3))),
    "addmm that ignores NaN": (lambda x, y: torch.addmm(torch.full((3,), float("nan")).double(), x, y, beta=0), ((4, 5), (5, 3))),
    "addbmm": (lambda x, y, b: b.addbmm(x, y), ((2, 4, 5), (2, 5, 3), (4, 3))),
    "mv, dot, outer": (lambda x, y, z: (x.mv(y), z.dot(y), torch.outer(y, z), torch.addmv(x[:, 0], x, y)), ((4, 5), (5,), (5,))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, 0])), ((4, 5, 6), (6, 4, 3))),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), ((3, 5), (3, 4), (2, 5, 4))),
    "multi_dot": (lambda x, y, z: torch.linalg.multi_dot([x, y, z]), ((3, 5), (5, 4), (4, 2))),
}


@pytest.mark.parametrize(("function", "shapes"), OTHERS.values(), ids=OTHERS)
def test_forms_that_keep_torchs_own_operators(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    check(function, *(real(*s, seed=i) for i, s in enumerate(shapes)))


NOT_NEUTRAL = ("mm", "_scaled_dot", "native_dropout", "_transformer_encoder", "_native_multi_head")


def _neutral(found: set[str], *expected: str) -> None:
    assert set(expected) <= found
    assert not [name for name in found if any(part in name for part in NOT_NEUTRAL)]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_transformer_encoder_layer(batch_first: bool, train: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64).train(train)
    graph, _ = check_eager(layer, real(3, 5, 8, grad=False), train=train)
    _neutral(targets(graph), "fxshard.einsum.default", "fxshard.sdpa.default")


def test_transformer_encoder_layer_with_dropout_has_no_other_random_operator() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    graph = trace(layer, (torch.randn(3, 5, 8),))
    _neutral(targets(graph), "fxshard.einsum.default", "fxshard.dropout.default")
    assert [n.args[3] for n in graph.nodes if n.target is torch.ops.fxshard.dropout.default] == [0, 1, 2, 3]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_multihead_attention(weights: bool, train: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.0, dtype=torch.float64).train(train)
    x, y = real(5, 3, 8, grad=False), real(7, 3, 8, grad=False)
    graph, _ = check_eager(module, x, y, y, kwargs={"need_weights": weights}, train=train)
    _neutral(targets(graph), "fxshard.einsum.default", *([] if weights else ["fxshard.sdpa.default"]))


def test_multihead_attention_with_masks() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, y = real(2, 5, 8, grad=False), real(2, 7, 8, grad=False)
    masks = {"key_padding_mask": ~PADDING[:, 0, 0], "attn_mask": ~KEPT}
    graph, _ = check_eager(module, x, y, y, kwargs={"need_weights": False, **masks})
    _neutral(targets(graph), "fxshard.einsum.default")


def test_torchs_functions_in_python_are_traced_into() -> None:
    """They are not listed by name: each first asks torch.overrides for a handler, and is then run without one."""
    found = check(lambda x, w: F.bilinear(x @ w, x, w[None]) + F.cosine_similarity(x, x @ w, dim=-1)[:, None], real(3, 5), real(5, 5))
    assert "fxshard.einsum.default" in found
    check(lambda x: x.unflatten(0, (2, 3)).norm(dim=-1).split(1), real(6, 5))


def test_the_fast_path_of_inference_stays_as_the_user_set_it() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    trace(nn.MultiheadAttention(8, 2).eval(), (torch.randn(3, 8),) * 3, train=False)
    assert torch.backends.mha.get_fastpath_enabled() == before
