"""Outlining with symbolic sizes: the subgraph takes the symbols as inputs, and one compilation serves every size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor import config, metrics
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch_compat.inductor.inductor import INVOKE_SUBGRAPH, inductor_decompositions
from fxshard._torch_compat.sizes.symbols import SymbolEnv, oblivious
from fxshard.runtime.compile import outline as outlining
from fxshard.runtime.compile.compile import _compile_graph
from fxshard.runtime.compile.outline import outline

Function = Callable[..., tuple[Tensor, ...]]
LAYERS = 6
WIDTH = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "MIN_SAVED_NODES", 8)


def traced(function: Function, layers: int, decompositions: Any = None) -> fx.GraphModule:
    """The graph of ``function(n, x, *weights)`` for every n, with x of shape (n, 4). As in a rank's graph, n is an input."""
    env = SymbolEnv()
    mode = FakeTensorMode(shape_env=env.shape_env)
    n = env.symbol("n", 6)
    with mode, oblivious(), torch.no_grad():
        x = torch.empty(n, WIDTH, dtype=torch.float64)
        ws = [torch.empty(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers)]
        module = make_fx(function, decompositions)(n, x, *ws)
    assert not env.shape_env.guards, "the graph is for every n"
    return module


def inputs(n: int, layers: int) -> tuple[Any, ...]:
    torch.manual_seed(n)
    return n, torch.randn(n, WIDTH, dtype=torch.float64), *(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2 for _ in range(layers))


def checked(function: Function, layers: int = LAYERS) -> tuple[tuple[int, ...], fx.GraphModule]:
    """Outlines the graph and compares results at four sizes: with the function's, and bit for bit with the graph before."""
    module = traced(function, layers)
    before = fx.GraphModule(module, copy.deepcopy(module.graph))
    calls = outline(module)
    for n in (1, 2, 6, 9):
        given = inputs(n, layers)
        with torch.no_grad():
            for one, same, other in zip(module(*given), before(*given), function(*given), strict=True):
                assert torch.equal(one, same)
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert len(list(module.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH))) == sum(calls)
    return calls, module


def stack(n: Any, x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
    """Layers with views, sums and constants that depend on n."""
    for w in ws:
        y = (x - x.mean(1, keepdim=True)) @ w
        y = y.view(n * 2, 2).tanh().view(n, WIDTH) + torch.arange(n, dtype=x.dtype).view(n, 1) / n
        x = y * torch.sigmoid(y) + x
    return (x,)


def test_layers_become_one_subgraph_that_takes_the_symbols() -> None:
    calls, module = checked(stack)
    assert len(calls) == 1 and calls[0] >= LAYERS - 1
    part = next(module.children())
    assert isinstance(part, fx.GraphModule)
    first = next(iter(part.graph.nodes))
    assert first.op == "placeholder" and str(first.meta["val"]) == str(next(iter(module.graph.nodes)).meta["val"])


def test_layers_of_different_lengths_are_not_repeats() -> None:
    def shrinking(n: Any, x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for i, w in enumerate(ws):
            x = (x @ w).tanh().exp().sin()
            x = torch.cat([x, x[:1]]) if i == 3 else x
            kept.append(x.sum())
        return (x, *kept)

    calls, _ = checked(shrinking, 7)
    assert calls == (), "three layers of n rows and four of n + 1, of which the first has other neighbours"
    assert checked(shrinking, 12)[0], "the layers of n + 1 rows are repeats"


def test_a_graph_without_the_size_as_input_is_unchanged() -> None:
    def chosen(n: Any, x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        for w in ws:
            x = ((x @ w).tanh() * 0.5 + x).exp().sin()
        return (x,)

    module = make_fx(chosen, tracing_mode="symbolic")(6, torch.randn(6, WIDTH), *[torch.randn(WIDTH, WIDTH)] * LAYERS)
    before = str(module.graph)
    assert outline(module) == () and str(module.graph) == before, "no input is the number of rows"


STEPS: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
    lambda n, a, b: a + b,
    lambda n, a, b: (a * b).tanh(),
    lambda n, a, b: a @ (b.t() @ a) / n,
    lambda n, a, b: (a - b).reshape(-1).narrow(0, n, 2 * n).view(n, 2).repeat(1, 2),
    lambda n, a, b: torch.cat(a.split(2, 1)[::-1], 1) + b,
    lambda n, a, b: a.sum(0, keepdim=True).expand(n, WIDTH),
    lambda n, a, b: a.t().contiguous().t() * torch.arange(n, dtype=a.dtype).unsqueeze(1),
    lambda n, a, b: torch.cat([a, b]).narrow(0, 1, n) * b.flip(0),
]


def test_any_repeated_graph() -> None:
    outlined: list[bool] = []
    _any_repeated_graph(outlined)
    assert sum(outlined) > len(outlined) // 3, "enough examples have repeats to outline"


@settings(deadline=None, max_examples=12, phases=[Phase.generate])
@given(st.data(), st.integers(4, 8), st.integers(3, 7))
def _any_repeated_graph(outlined: list[bool], data: st.DataObject, layers: int, length: int) -> None:
    picks = st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.booleans())
    program = data.draw(st.lists(picks, min_size=length, max_size=length))

    def random_stack(n: Any, x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        shared, kept = x.sin(), []
        for w in ws:
            values = [x, x @ w, shared]
            for step, first, second, returned in program:
                values.append(step(n, values[-1 - first % len(values)], values[-1 - second % len(values)]))
                if returned:
                    kept.append(values[-1])
            x = values[-1].sigmoid()
        return (x, *kept)

    outlined.append(bool(checked(random_stack, layers)[0]))


def compiled(layers: int) -> int:
    """The number of kernels that Inductor generates for ``stack``; checks that one compilation gives its results at six sizes."""
    module = traced(stack, layers, inductor_decompositions())
    metrics.reset()
    with config.patch(force_disable_caches=True):
        run = _compile_graph(module, "inductor", 1, is_inference=True)
    assert run is not None
    for n in (6, 1, 2, 7, 16, 33):
        given = inputs(n, layers)
        torch.testing.assert_close(run(list(given))[0], stack(*given)[0], rtol=1e-12, atol=1e-12)
    return metrics.generated_kernel_count


def test_one_compilation_for_all_layers_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = compiled(6)
    assert compiled(12) == few
    monkeypatch.setattr(outlining, "MIN_REPEATS", 100)
    assert compiled(12) > few
