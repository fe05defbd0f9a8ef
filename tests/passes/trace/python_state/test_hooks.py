"""Hooks of submodules in a trace: what they compute is in the graph; side effects that no graph can have are detected and named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fxshard.errors import TraceError
from fxshard.graph.planning_graph import TappedCall, Watched
from fxshard.passes.trace.trace import trace

X = torch.randn(3, 4)
Kept = list[Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def count(kept: Kept) -> Any:
    calls = 0

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    return hook


def nans(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    if torch.isnan(out).any():
        raise ValueError("NaN")


def attribute(module: Any, args: Any, out: torch.Tensor) -> None:
    module.activation = out


CALLED: dict[str, tuple[Callable[[Kept], Any], bool]] = {
    "appends": (lambda kept: lambda module, args, out: kept.append(out), False),
    "counts": (count, False),
    "sets an attribute": (lambda kept: attribute, False),
    "prints": (lambda kept: lambda module, args, out: print(out.shape), True),
    "looks at data": (lambda kept: nans, True),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_hook_with_side_effects_is_called_after_the_graph(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The graph returns its arguments. A plan, which does not call it, warns. No hook ever gets a fake tensor."""
    make, opaque = CALLED[name]
    kept: Kept = []
    model = net()
    key = model[0].register_forward_hook(make(kept)).id
    graph = trace(model, (X,), observe=True)
    assert graph.watched is not None and [(w.module, w.key, bool(w.opaque)) for w in graph.watched] == [("0", key, opaque)]
    assert [o.name for o in graph.outputs if o.kind == "output"] == ["outputs[0]", "outputs[1]", "outputs[2]"]
    with caplog.at_level(logging.WARNING, "fxshard"):
        plain = trace(model, (X,))
    assert plain.watched is None and plain.hash == trace(net(), (X,)).hash
    assert "the forward hook " in caplog.text and "only a parallelized module calls it" in caplog.text
    assert not kept and not capsys.readouterr().out and not hasattr(model[0], "activation")


COMPUTED: dict[str, Callable[[nn.Sequential], Any]] = {
    "a value": lambda m: m[0].register_forward_hook(lambda module, args, out: out.sin()),
    "arguments": lambda m: m[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),)),
    "arguments by name": lambda m: m[1].register_forward_pre_hook(lambda module, args, kw: ((args[0].sin(),), kw), with_kwargs=True),
    "always": lambda m: m[0].register_forward_hook(lambda module, args, kw, out: out.sin(), with_kwargs=True, always_call=True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_hook_computes_is_in_the_graph(name: str) -> None:
    class Sin(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    model = net()
    COMPUTED[name](model)
    graph = trace(model, (X,), observe=True)
    first, relu, last = net()
    want = trace(nn.Sequential(first, Sin(), relu, last), (X,))
    assert graph.watched == ()
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [n.target for n in want.nodes if n.op == "call_function"]


def test_hooks_of_all_modules() -> None:
    kept: Kept = []
    with register_module_forward_hook(lambda module, args, out: kept.append(type(module).__name__)) as handle:
        graph = trace(net(), (X,), observe=True)
    assert graph.watched == tuple(Watched(name, handle.id) for name in ("0", "1", "2")) and not kept


REFUSED: dict[str, tuple[Callable[[nn.Sequential, Kept], Any], str]] = {
    "both": (
        lambda m, kept: m[0].register_forward_hook(lambda module, args, out: (kept.append(1), out * 2)[1]),
        r"the forward hook <lambda> \(.*test_hooks.py:\d+\) of 0 returns a value and changes Python objects(.|\n)*make two hooks",
    ),
    "of the model": (
        lambda m, kept: m.register_full_backward_hook(lambda module, given, out: None),
        r"the backward hook <lambda> \(.*test_hooks.py:\d+\) of the model would not be called(.|\n)*on the model itself after parallelize",
    ),
    "of another kind": (
        lambda m, kept: m[0].register_backward_hook(lambda module, given, out: None),
        r"the backward hook <lambda> .* of 0 would not be called(.|\n)*register_full_backward_hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_hooks_are_refused(name: str) -> None:
    model, (register, said) = net(), REFUSED[name]
    handle = register(model, [])
    with pytest.raises(TraceError, match=said):
        trace(model, (X,), observe=True)
    handle.remove()
    assert trace(model, (X,), observe=True).watched is None


def test_gradients_that_hooks_see(caplog: pytest.LogCaptureFixture) -> None:
    """They are gradients of taps, one for each tensor that has a gradient. Calls of inner modules begin later and end earlier."""
    model = nn.Sequential(net(), nn.Linear(2, 2))
    with model[0].register_full_backward_pre_hook(print), model[0][2].register_full_backward_hook(print):
        graph = trace(model, (X,), observe=True)
        with caplog.at_level(logging.WARNING, "fxshard"):
            assert trace(model, (X,)).hash == trace(nn.Sequential(net(), nn.Linear(2, 2)), (X,)).hash
        assert "the backward hook print of 0.2 does what a plan cannot include" in caplog.text
        assert trace(model, (X,), train=False, observe=True).tapped == ()
    assert graph.tapped == (TappedCall("0", (None,), (2,), 1, 4), TappedCall("0.2", (0,), (1,), 2, 3))
    assert [i.name for i in graph.inputs_of("input")] == ["args[0]", "taps[0]", "taps[1]", "taps[2]"]
    assert {"taps[0]", "taps[1]", "taps[2]"} <= {o.name for o in graph.outputs if o.kind == "gradient"}


def test_a_backward_hook_of_a_module_that_returns_a_dict_is_refused() -> None:
    class Dict(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x * 2}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.part = nn.Linear(4, 4), Dict()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(self.layer(x))["x"]

    model = Net()
    model.part.register_full_backward_hook(print)
    with pytest.raises(TraceError, match="part has a backward hook that torch would not call: it returns neither"):
        trace(model, (X,), observe=True)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("observe", [False, True])
def test_torchs_own_hooks_are_only_in_the_graph(wrap: Callable[..., Any], observe: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The forward reads the attributes that they write, so they are not called after the graph, and there is no warning."""
    model = net()
    wrap(model[0])
    assert trace(model, (X,), observe=observe).watched == (() if observe else None)
    assert "changes Python objects" not in caplog.text


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = {1, 2}
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("observe", [False, True])
def test_side_effects_of_a_module_with_such_hooks_are_reported(observe: bool, caplog: pytest.LogCaptureFixture) -> None:
    trace(nn.Sequential(nn.utils.weight_norm(Counting(4, 4))), (X,), observe=observe)
    assert "changes Python objects" in caplog.text
