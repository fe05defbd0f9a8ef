"""A derived class tracks a module's attributes. User code does not notice it, even if its classes react to being subclassed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.passes.trace.python_state.attribute_tracking import recording
from fxshard.passes.trace.trace import trace

MADE: list[str] = []


class Announced(nn.Module):
    """A class that lists its subclasses, and requires an argument from them."""

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MADE.append(key)


class Meta(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        MADE.append(name)
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        MADE.append(name)
        super().__init__(name, bases, body)


class Base(ABC, nn.Module):
    @abstractmethod
    def scale(self) -> int: ...


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return self.layer(x) * self.scale()


def body() -> dict[str, Any]:
    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.layer, self.calls = nn.Linear(4, 2), 0

    return {"__init__": init, "forward": counts, "scale": lambda self: 3, "__module__": __name__}


KINDS = {
    "plain": type("Plain", (nn.Module,), body()),
    "announced": type("Derived", (Announced,), body(), key="derived"),
    "metaclass": Meta("Made", (nn.Module,), body()),
    "abstract": type(Base)("Concrete", (Base,), body()),
}


@pytest.mark.parametrize("name", KINDS)
def test_tracking_runs_no_code_of_the_class(name: str) -> None:
    kind, x = KINDS[name], torch.randn(3, 4)
    model, before = kind(), list(MADE)
    with recording(model, (), {}) as noted:
        out = model(x)
        assert isinstance(model, kind) and type(model).__name__ == kind.__name__
    assert type(model) is kind and before == MADE, "the class is restored, and no code of the user has run"
    torch.testing.assert_close(out, model.layer(x) * 3)
    assert (0, "calls") in noted.reads and "layer" not in {attribute for _, attribute in noted.writes}
    assert "test_attribute_tracking.py" in noted.writes[0, "calls"]


@pytest.mark.parametrize("name", KINDS)
def test_counters_of_such_a_model_are_tracked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = list(MADE)
    effects = trace(KINDS[name](), (torch.randn(3, 4),), observe=True).side_effects
    assert effects is not None and [write.path for write in effects.writes] == ["calls"]
    assert before == MADE and "changes Python objects" not in caplog.text
