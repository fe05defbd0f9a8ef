"""Objects among arguments and results: the same class and values as without fxshard, or refused by name."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.trace.trace import trace

Pair = namedtuple("Pair", "first second")


@dataclass
class State:
    h: Any
    steps: int = 0
    log: list[Any] = field(default_factory=list)
    inner: Any = None


@dataclass(slots=True)
class Slots:
    h: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    h: torch.Tensor


@dataclass
class Registered:
    h: torch.Tensor
    other: torch.Tensor


pytree.register_dataclass(Registered)


class Model(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(4, 4, dtype=torch.float64), forward

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        return self.inside(self.layer(x), state)


def grows(y: torch.Tensor, state: State) -> Any:
    state.h = torch.cat([state.h, y])
    state.steps += 1
    state.log.append(y.sum())
    return y.mean(), state


def in_place(y: torch.Tensor, state: State) -> Any:
    state.h.add_(y)
    return state.h * 2


def nested(y: torch.Tensor, state: State) -> Any:
    state.inner.h = (state.inner.h[0] + y, state.inner.h[1])
    state.inner.log[0] = {"y": y, "n": 3}
    return {"same": state.inner, "new": [State(y, 7), None, "text"], "pair": Pair(y, state.h)}


def replaced(y: torch.Tensor, state: State) -> Any:
    state.inner, old = Slots(y), state.inner
    return old, state.inner, y.sum().item()


def tensor() -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


CALLS: dict[str, tuple[Any, Any]] = {
    "no object given, one returned": (lambda y, state: State(y, 2, [y * 2, "text"]), None),
    "attributes, numbers and lists are changed": (grows, State(tensor())),
    "a tensor is changed in place": (in_place, State(tensor())),
    "objects in objects": (nested, State(tensor(), inner=State((tensor(), tensor()), log=[tensor()]))),
    "an object takes the place of another": (replaced, State(tensor(), inner=Frozen(tensor()))),
    "slots": (lambda y, state: Slots(state.h + y), Slots(tensor())),
    "frozen": (lambda y, state: (state, Frozen(state.h + y)), Frozen(tensor())),
    "registered with torch.utils._pytree": (lambda y, state: Registered(y + state.h, state.other), Registered(tensor(), tensor())),
    "a registered one is returned": (lambda y, state: Registered(y, y.sum()), None),
    "namedtuple": (lambda y, state: Pair(state.second, state.first + y), Pair(tensor(), tensor())),
    "options without tensors": (lambda y, state: y * state.steps, State(None, 3)),
}


def alike(have: Any, want: Any) -> None:
    assert type(have) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
    elif isinstance(want, list | tuple | dict):
        for one, other in zip(_items(have), _items(want), strict=True):
            alike(one, other)
    elif hasattr(want, "__dataclass_fields__"):
        for name in want.__dataclass_fields__:
            alike(getattr(have, name), getattr(want, name))
    else:
        assert have == (pytest.approx(want, rel=1e-9) if isinstance(want, float) else want)


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_objects_come_back_as_on_one_device(name: str, train: bool) -> None:
    torch.manual_seed(0)
    forward, state = CALLS[name]
    if train and forward in (in_place, replaced):
        pytest.skip("the gradient would flow into a tensor that is changed in place, or through a number")
    model, x = Model(forward), torch.randn(5, 4, dtype=torch.float64)[:4]
    plan = fxshard.plan(model, (x, state), fxshard.Mesh({"dp": 2}), train=train, cache=False, pins={"args[0]": "S(0)"})
    before = copy.deepcopy(state)
    result = fxshard.simulate(model, (x, state), plan)
    alike(state, before)  # the simulator leaves the caller's objects unchanged
    with torch.no_grad():
        alike(result.outputs, model(x, before))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a set": (lambda y, state: {y}, None, "outputs is a set that holds tensors"),
    "in an object": (lambda y, state: State({y}), None, "outputs.h is a set that holds tensors"),
    "what has no attributes": (lambda y, state: [memoryview(b"1"), y], None, "builtins.memoryview"),
    "an argument twice": (lambda y, state: y + state[0].h, (twice := State(tensor()), twice), "two arguments hold the same State"),
    "a set in an argument": (lambda y, state: y + next(iter(state.h)), State({tensor()}), ".h is a set that holds tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_flattened_are_refused(name: str) -> None:
    forward, state, said = REFUSED[name]
    with pytest.raises(fxshard.FxshardError, match=said) as error:
        fxshard.plan(Model(forward), (tensor(), state), fxshard.Mesh({"dp": 2}), train=False, cache=False)
    assert error.value.remedy


@pytest.mark.parametrize("made", [threading.Lock, object])
def test_a_new_value_that_holds_no_tensors_is_refused_by_its_class(made: Any) -> None:
    """Each call would return the object that was made while tracing."""

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"y": self.linear(x), "lock": made()}

    with pytest.raises(TraceError, match=rf"returns a \w+\.{type(made()).__name__}\b"):
        trace(Locked(), (torch.randn(2, 3),))
