"""Outlining: repeated parts of a graph become calls of one subgraph, and results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch_compat.inductor.inductor import INVOKE_SUBGRAPH
from fxshard.runtime.compile import outline as outlining
from fxshard.runtime.compile.outline import outline

aten = torch.ops.aten
LAYERS = 6


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "MIN_SAVED_NODES", 8)


def checked(function: Callable[..., Any], *inputs: Tensor) -> tuple[tuple[int, ...], fx.GraphModule]:
    """Traces and outlines ``function``, and compares the results with the function's own."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    calls = outline(module)
    with torch.no_grad():
        found = module(*inputs)
    expected = function(*inputs)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert len(list(module.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH))) == sum(calls)
    return calls, module


def layer(x: Tensor, weight: Tensor, scale: float = 0.5) -> Tensor:
    return (x @ weight).tanh() * scale + x


def weights(count: int = LAYERS) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4) for _ in range(count)]


def test_equal_layers_become_one_subgraph() -> None:
    def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor]:
        for w in ws:
            x = layer(x, w)
        return (x.sum(),)

    calls, module = checked(stack, torch.randn(3, 4), *weights())
    assert len(calls) == 1 and calls[0] >= LAYERS - 1
    assert checked(stack, torch.randn(3, 4), *weights(outlining.MIN_REPEATS - 1))[0] == ()
    left = [n for n in module.graph.nodes if n.op == "call_function" and n.target is aten.tanh.default]
    assert len(left) <= 1, "outside of the calls less than a layer is left"


@pytest.mark.parametrize("other", ["constant", "stride", "dtype of a constant", "read from further back", "read by others"])
def test_layers_that_differ_are_not_repeats(other: str) -> None:
    def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        before, kept = x, []
        for i, w in enumerate(ws):
            odd = i == 3
            scale: Any = {"constant": 0.25, "dtype of a constant": 1}.get(other, 1.0) if odd else 1.0
            y = (x @ w).tanh()
            z = (y * scale + (before if odd and other == "read from further back" else x)).exp().sin()
            before, x = x, z
            kept += [y] if odd and other == "read by others" else []
        return (x, *kept)

    def given(count: int) -> list[Tensor]:
        return [w.t().contiguous().t() if i == 3 and other == "stride" else w for i, w in enumerate(weights(count))]

    calls, _ = checked(stack, torch.randn(3, 4), *given(4))
    assert calls == (), "one of four layers differs, and three are too few"
    assert sum(checked(stack, torch.randn(3, 4), *given(12))[0]) in range(6, 12), "the layers after the odd one are repeats"


def test_layers_may_read_parts_of_one_value_by_index() -> None:
    def stack(x: Tensor, scales: Tensor, *ws: Tensor) -> tuple[Tensor]:
        rows = scales.exp()
        for i, w in enumerate(ws):
            x = layer(x, w) * rows.select(0, i)
        return (x,)

    calls, _ = checked(stack, torch.randn(3, 4), torch.randn(LAYERS, 4), *weights())
    assert len(calls) == 1 and calls[0] >= LAYERS - 1


def test_views_are_repeated_outside_of_the_subgraph() -> None:
    def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for w in ws:
            y = (x @ w).tanh()
            first, second = y.t().split(2)
            kept += [y.view(-1), second.exp()]
            x = torch.cat([first, second]).t() + y.unsqueeze(0).squeeze(0)
        return (x, *kept)

    calls, module = checked(stack, torch.randn(4, 4), *weights())
    assert calls
    for name, part in module.named_children():
        outputs = [n.meta["val"].untyped_storage()._cdata for n in part.graph.output_node().args[0]]
        inputs = {n.meta["val"].untyped_storage()._cdata for n in part.graph.find_nodes(op="placeholder")}
        assert len(set(outputs)) == len(outputs) and not inputs & set(outputs), name
        joins = part.graph.find_nodes(op="call_function", target=aten.cat.default)
        assert not joins, "a concatenation whose parts others read stays outside"


def test_collectives_and_writes_stay_in_their_order() -> None:
    reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default

    def stack(x: Tensor, cache: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        for w in ws:
            x = wait(reduce(layer(x, w).cos().exp(), "sum", "0")).sin()
        return x, aten.copy_.default(cache, layer(x, ws[0]))

    module = make_fx(stack, tracing_mode="fake")(torch.randn(3, 4), torch.randn(3, 4), *weights())
    before = [n.name for n in module.graph.nodes if "c10d" in str(n.target)]
    assert outline(module)
    assert [n.name for n in module.graph.nodes if "c10d" in str(n.target)] == before
    written = module.graph.find_nodes(op="call_function", target=aten.copy_.default)[0].args[1]
    assert written.target is aten.add.Tensor
    assert not any("c10d" in str(n.target) for part in module.children() for n in part.graph.nodes)


def test_nothing_is_outlined_for_the_cpp_wrapper() -> None:
    def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor]:
        for w in ws:
            x = layer(x, w)
        return (x,)

    with config.patch(cpp_wrapper=True):
        assert checked(stack, torch.randn(3, 4), *weights())[0] == ()


STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: a + b,
    lambda a, b: (a * b).tanh(),
    lambda a, b: a.t() - b,
    lambda a, b: torch.cat(a.split(2)[::-1]) + b,
    lambda a, b: (a @ b).view(-1)[4:12].view(2, 4).repeat(2, 1),
    lambda a, b: a.sum(0, keepdim=True).expand(4, 4),
]


def test_any_repeated_graph() -> None:
    outlined: list[bool] = []
    _any_repeated_graph(outlined)
    assert sum(outlined) > len(outlined) // 3, "enough examples have repeats to outline"


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(4, 9), st.integers(3, 8))
def _any_repeated_graph(outlined: list[bool], data: st.DataObject, layers: int, length: int) -> None:
    picks = st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.booleans())
    program = data.draw(st.lists(picks, min_size=length, max_size=length))
    odd = data.draw(st.integers(0, layers))

    def stack(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        shared, kept, previous = x.sin(), [], x
        for i, w in enumerate(ws):
            values = [x, w, shared, previous]
            for step, first, second, returned in program:
                values.append(step(values[-1 - first % len(values)], values[-1 - second % len(values)]))
                if returned or (i == odd and first == 0):
                    kept.append(values[-1])
            previous, x = x, values[-1].sigmoid()
        return (x, *kept)

    outlined.append(bool(checked(stack, torch.randn(4, 4), *weights(layers))[0]))


def test_values_with_different_alignment_are_not_repeats() -> None:
    """GPU kernels read several elements at once if the first is aligned to 16 bytes."""

    def layers(x: Tensor, row: int) -> list[Tensor]:
        out = [x.new_zeros(6)]
        for i in range(LAYERS):
            out.append(torch.sin(torch.cos(torch.exp(x[row * i : row * i + 6] * out[-1]))))
        return out[1:]

    assert checked(lambda x: layers(x, 8), torch.randn(8 * LAYERS))[0]
    assert not checked(lambda x: layers(x, 7), torch.randn(8 * LAYERS))[0]
