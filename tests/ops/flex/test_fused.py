"""flex_attention by torch's operator: lists of blocks as torch's BlockMask has them, results and gradients as fxshard's own operator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import fxshard.ops.flex.fused as fused
from fxshard._torch_compat.flex_attention import flex_operators
from fxshard.ops.flex.attention import empty_results, fake_gradients
from fxshard.ops.flex.blocks import block_lists, seen_scores
from fxshard.runtime.compile.cuts import FUSED_FLEX
from fxshard.runtime.compile.flex_kernels import use_flex_kernels
from fxshard.runtime.rank_graph.kernels import device_graph
from tests.ops.flex.test_functions import text

CPU = torch.device("cpu")
DOCUMENTS = (torch.arange(700) // 90).expand(2, 700).contiguous()
SLOPES = torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
WINDOW = text(lambda b, h, q, k: (q >= k) & (q - k < 40))
SAME = text(lambda b, h, q, k, d: (d[b, q] == d[b, k]) & (q >= k), DOCUMENTS)
ALIBI = text(lambda s, b, h, q, k, t: s + t[h] * (k - q), SLOPES, of_score=True)


@pytest.mark.parametrize(
    ("mask", "tensors", "function"),
    [
        (SAME, (DOCUMENTS,), lambda b, h, q, k: (DOCUMENTS[b, q + 300] == DOCUMENTS[b, k]) & (q + 300 >= k)),
        (WINDOW, (), lambda b, h, q, k: (q + 300 >= k) & (q + 300 - k < 40)),
    ],
)
def test_lists_of_a_shard_are_those_of_torch(mask: str, tensors: Sequence[Tensor], function: Any) -> None:
    """Queries 300 to 500 of 700."""
    same_lists(block_lists(seen_scores((2, 4, 200, 700), mask, tensors, (None, None, torch.tensor(300)), CPU)), function)


def same_lists(found: Sequence[Tensor], function: Any) -> None:
    """``found`` is the start of torch's lists for 200 queries and 700 keys: what follows a row's number of blocks is not read."""
    wanted = create_block_mask(function, 2, 4, 200, 700, device="cpu").as_tuple()[2:10]
    for (count, order), (torchs_count, torchs_order) in zip(_pairs(found), _pairs(wanted), strict=True):
        assert torch.equal(count.expand_as(torchs_count), torchs_count)
        valid = torch.arange(order.shape[-1]) < torchs_count.unsqueeze(-1)
        assert torch.equal(order.expand_as(torchs_order)[valid], torchs_order[valid])
        assert order.dtype == torch.int32 and order.is_contiguous()


def _pairs(lists: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(lists[::2], lists[1::2], strict=True))


SPLITS = (2, 3, 5)


def step(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, slopes: Tensor, row: Tensor, grad: Tensor) -> Any:
    """On queries of a shard: layers with documents of their own, dead after them; two layers with the same, and one's backward with all its
    gradients."""
    dead = [torch.ops.fxshard.flex_attention(q, k, v, [], [documents // n], None, None, row, "[5,[],0]", SAME, 0.3)[0] for n in SPLITS]
    mods = [slopes], [documents], None, None, row, ALIBI, SAME, 0.3
    first, lse, most = torch.ops.fxshard.flex_attention(q, k, v, *mods)
    second, *_ = torch.ops.fxshard.flex_attention(first, k, v, *mods)
    given = (grad, lse.sin(), q, k, v, first, lse, *mods, [0])
    return *dead, first, lse, most, second, *torch.ops.fxshard.flex_attention_backward(*given)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, size, 16, dtype=torch.float64) for heads, size in ((4, 200), (2, 700), (2, 700)))
    return [q, k, v, DOCUMENTS, SLOPES, torch.tensor(300), torch.randn_like(q)]


@pytest.fixture(scope="module")
def lowered() -> fx.GraphModule:
    return lower()


def lower() -> fx.GraphModule:
    """The graph of ``step`` as Inductor gets it on CUDA, here for float64 on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "DTYPES", (torch.float64,))
        return device_graph(make_fx(step, tracing_mode="fake")(*inputs()), CPU, {}, fused=True)


def test_the_lowered_graph_equals_fxshards_operator(lowered: fx.GraphModule) -> None:
    graph = fx.Graph()
    graph.output(graph.graph_copy(lowered.graph, {}))
    module = fx.GraphModule(lowered, graph)
    assert use_flex_kernels(module) == 6
    assert {n.target for n in module.graph.nodes} >= set(flex_operators())
    given = inputs()
    given[4] = SLOPES.clone().requires_grad_()  # torch's uncompiled operator gives gradients of such tensors only
    with torch.no_grad():
        for have, want in zip(module(*given), step(*given), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)


class Lists(fx.Interpreter):
    """Runs a graph, and instead of each fused attention keeps its lists, which torch's uncompiled operator does not read."""

    found: list[list[Tensor]]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in FUSED_FLEX:
            return super().call_function(target, args, kwargs)
        forward = target is FUSED_FLEX[0]
        self.found.append(args[8 if forward else 12])
        return empty_results(args[0], args[2]) if forward else fake_gradients(*args[:8], args[-1])


def test_each_call_has_the_lists_of_its_mask(lowered: fx.GraphModule) -> None:
    run = Lists(lowered)
    run.found = []
    run.run(*inputs())
    assert len(run.found) == 6
    for found, split in zip(run.found, (*SPLITS, 1, 1, 1), strict=True):
        table = DOCUMENTS // split
        same_lists(found, lambda b, h, q, k, table=table: (table[b, q + 300] == table[b, k]) & (q + 300 >= k))


def test_tensors_live_as_long_as_the_lists_found_by_their_ids() -> None:
    """Else another tensor gets the id of a dead one, and with it the lists."""
    shared: dict[Any, Any] = {}
    q, k, *_ = inputs()
    table, row = DOCUMENTS.clone(), torch.tensor(300)
    alive = weakref.ref(table), weakref.ref(row)
    fused._lists(shared, q, k, SAME, [table], (None, None, row))
    del table, row
    assert all(one() is not None for one in alive)


def test_layers_and_the_backward_share_the_lists(lowered: fx.GraphModule) -> None:
    assert len(lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.scatter.src)) == 4 * (len(SPLITS) + 1)


def test_lists_end_with_their_graph() -> None:
    """Fake tensors hold the mode of their trace."""
    graph = lower()
    mode = weakref.ref(graph.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode)
    assert mode() is not None
    del graph
    gc.collect()
    assert mode() is None


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (torch.empty(1, 1, 4, 16, dtype=torch.float64), "float64"),
        (torch.empty(1, 1, 4, 8), "heads of 8"),
        (torch.empty(1, 1, 0, 16), "without queries"),
        (torch.empty(1, 1, 4, 16), None),
    ],
)
def test_what_torchs_kernels_cannot_do(q: Tensor, reason: str | None) -> None:
    found = fused.reason_against(q, q, q)
    assert found is None if reason is None else reason in (found or "")
