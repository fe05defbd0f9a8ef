"""A ``forward`` that is an instance attribute is rebound to the traced copy of the model, so that parameters have their names."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.errors import TraceError
from fxshard.passes.trace.fakes.rebind import rebind
from fxshard.passes.trace.trace import trace

X = torch.randn(3, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any) -> Any:
        return forward(*args) * 2

    return call


FORWARDS: dict[str, Callable[[Any], tuple[Any, list[str]]]] = {
    "a method": lambda m: (types.MethodType(lambda self, x: self.b(x), m), ["b.weight", "b.bias"]),
    "a closure": lambda m: (lambda x: m.b(x), ["b.weight", "b.bias"]),
    "a closure over a parameter": lambda m, p=None: ((lambda w: lambda x: x @ w)(m.b.weight), ["b.weight"]),
    "a default argument": lambda m: (lambda x, b=m.b: b(x), ["b.weight", "b.bias"]),
    "a list": lambda m: ((lambda parts: lambda x: parts[0](x))([m.b, m.a]), ["b.weight", "b.bias"]),
    "a partial": lambda m: (functools.partial(lambda self, x: self.b(x), m), ["b.weight", "b.bias"]),
    "a decorated method": lambda m: (timed(m.forward), ["a.weight", "a.bias"]),
    "decorated twice": lambda m: (timed(timed(functools.partial(m.forward))), ["a.weight", "a.bias"]),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_parameters_have_their_names(name: str) -> None:
    model: Any = Two()
    model.forward, want = FORWARDS[name](model)
    kept = model.forward
    graph = trace(model, (X,))
    assert sorted(i.name for i in graph.inputs_of("parameter")) == sorted(want)
    assert sorted(o.name for o in graph.outputs if o.kind == "gradient") == sorted(want)
    assert model.forward is kept or model.forward == kept


def test_a_parameter_of_another_module_is_named() -> None:
    for make in (lambda m, other: lambda x: other(m.a(x)), lambda m, other: functools.partial(lambda o, x: o(x), other)):
        model: Any = Two()
        other = nn.Linear(4, 4)
        model.forward = make(model, other)
        with pytest.raises(TraceError, match=r"a parameter that the model does not hold: (other|argument 0).weight(.|\n)*as a submodule"):
            trace(model, (X,))
        model.other = other
        assert "other.weight" in {i.name for i in trace(model, (X,)).inputs}


def test_only_functions_that_read_the_model_are_replaced() -> None:
    def itself(x: Tensor) -> Tensor:
        return itself(model.a(x)) if x.numel() > 99 else model.a(x)

    def other(x: Tensor) -> Tensor:
        return x

    model: Any = Two()
    model.itself, model.other, memo = itself, other, {}
    copied: Any = copy.deepcopy(model, memo)
    rebind(copied, memo)
    assert copied.other is other and copied.itself is not itself and model.itself is itself
    cells = dict(zip(copied.itself.__code__.co_freevars, (c.cell_contents for c in copied.itself.__closure__), strict=True))
    assert cells["model"] is copied and cells["itself"] is copied.itself
