"""Inductor compiles an outlined subgraph once, with unchanged results; calls do not overwrite each other's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config, metrics
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch_compat.inductor.inductor import inductor_decompositions
from fxshard.runtime.compile import outline as outlining
from fxshard.runtime.compile.compile import _compile_graph

Function = Callable[..., tuple[Tensor, ...]]


def traced(function: Function, *inputs: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(function, inductor_decompositions(), tracing_mode="fake")(*inputs)


def written(function: Function, *inputs: Tensor) -> int:
    """The number of kernels that Inductor generates for ``function``; checks its results, and that inputs are unchanged."""
    module = fx.GraphModule(torch.nn.Module(), traced(function, *inputs).graph)
    metrics.reset()
    with config.patch(force_disable_caches=True):
        run = _compile_graph(module, "inductor", 1, is_inference=True)
    assert run is not None
    count, before = metrics.generated_kernel_count, [x.clone() for x in inputs]
    for _ in range(2):
        for one, other in zip(run(list(inputs)), function(*inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert all(map(torch.equal, inputs, before))
    return count


def weights(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(16, 16, dtype=torch.float64) / 4 for _ in range(count)]


def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
    for w in ws:
        x = (x - x.mean(1, keepdim=True)) @ w
        x = (x * torch.sigmoid(x)) @ w.t() + x
    return (x,)


@pytest.mark.slow
def test_kernels_do_not_grow_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "MIN_SAVED_NODES", 8)
    x = torch.randn(8, 16, dtype=torch.float64)
    few = written(stack, x, *weights(6))
    assert written(stack, x, *weights(12)) == few
    monkeypatch.setattr(outlining, "MIN_REPEATS", 100)
    assert written(stack, x, *weights(12)) > few


def test_values_between_calls_keep_their_memory() -> None:
    def tangled(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        kept, skipped = [], x
        for w in ws:
            y = (x @ w).tanh()
            first, second = y.split(8)
            joined = torch.cat([second.exp(), first])
            kept += [first.view(-1), joined.t(), w.t()]
            x, skipped = joined.clone() + skipped.flip(0), y.expand(16, 16).contiguous()
        return (x, *kept)

    module = traced(tangled, torch.randn(16, 16, dtype=torch.float64), *weights(7))
    assert outlining.outline(module)
    written(tangled, torch.randn(16, 16, dtype=torch.float64), *weights(7))


def test_buckets_are_computed_in_place() -> None:
    def gradients(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        grads = []
        for w in ws:
            y = x @ w
            grads.append((x.t() @ y.sin()).view(-1))
            x = (y.tanh() * y + x - y.cos()).exp().clamp(max=1.0)
        return (x, torch.cat(grads))

    module = traced(gradients, torch.randn(8, 16, dtype=torch.float64), *weights(8))
    assert outlining.outline(module)
    products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) >= 8, "products that go into a bucket are not outlined"
    written(gradients, torch.randn(8, 16, dtype=torch.float64), *weights(8))
