"""Models that do not trace to one graph: the error names the user's line, the cause and the remedy."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxshard.errors import TraceError
from fxshard.graph.planning_graph import is_user_file
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import Function, real

X = real(4, 4)


def prints(self: Any, x: torch.Tensor) -> torch.Tensor:
    print("here")  # culprit
    return x


def reads_a_number(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum().item() > 0:  # culprit
        return x + 1
    return x


def branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # culprit
        return x + 1
    return x


def as_list(self: Any, x: torch.Tensor) -> Any:
    return x.tolist()  # culprit


def wrong_shapes(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + x[:, :3]  # culprit


def branches_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))  # culprit


def reseeds(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # culprit
    return x + torch.rand(4)


def logs(self: Any, x: torch.Tensor) -> torch.Tensor:
    logging.warning("here")  # culprit
    return x


def deeper(self: Any, x: torch.Tensor) -> torch.Tensor:
    return branches(self, x)


CASES: dict[Callable[..., Any], str] = {
    prints: "`print`",
    reads_a_number: "data-dependent",
    branches: "data-dependent branching",
    as_list: "tolist",
    wrong_shapes: r"broadcast a dimension of length 3",
    branches_inside: "cond holds a graph of its own",
    reseeds: "manual_seed",
    logs: "does not trace to one graph",
}


def culprit(function: Callable[..., Any]) -> str:
    """``file:line: code`` of the line with that comment."""
    lines, first = inspect.getsourcelines(function)
    ((number, line),) = [(first + i, line) for i, line in enumerate(lines) if "# culprit" in line]
    return f"{__file__}:{number}: {line.strip()}"


@pytest.mark.parametrize(("function", "message"), CASES.items(), ids=[f.__name__ for f in CASES])
def test_the_error_names_the_line_and_the_cause(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"(?i){message}") as caught:
        trace(Function(function), (X,))
    line = culprit(function)
    assert caught.value.where in (line, line.split("  #")[0])
    assert caught.value.remedy
    assert line.split("  #")[0] in str(caught.value)


class Takes(nn.Module):
    """Accepts up to ``most`` rows of 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, most: int = 8) -> torch.Tensor:
        if len(x) > most:
            raise ValueError(f"at most {most} rows")
        return self.linear(x)


REFUSED = {
    "shape": ((torch.ones(3, 5),), {}, r"raises RuntimeError: .*\[3, 5\] X \[4, 2\]", "return self.linear(x)"),
    "missing": ((), {}, r"raises TypeError: .*forward\(\) missing 1 required positional argument: 'x'", "def forward(self, x: "),
    "keyword": ((torch.ones(3, 4),), {"z": 1}, r"raises TypeError: .*unexpected keyword argument 'z'", "def forward(self, x: "),
    "own": ((torch.ones(9, 4),), {}, "raises ValueError: at most 8 rows", 'raise ValueError(f"at most {most} rows")'),
}


@pytest.mark.parametrize(("args", "kwargs", "message", "line"), REFUSED.values(), ids=REFUSED)
def test_errors_of_the_model_itself(
    args: Any, kwargs: Any, message: str, line: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They keep their type, text and line, without Dynamo's wrapping. The random generator is unchanged, and torch logs no traceback."""
    model = Takes()
    trace(model, (torch.ones(3, 4),))
    state = torch.get_rng_state()
    with pytest.raises(TraceError, match=f"the forward of Takes {message}") as caught:
        trace(model, args, kwargs)
    assert f"{__file__}:" in caught.value.where and line in caught.value.where
    assert caught.value.remedy.startswith("check the arguments")
    assert torch.equal(state, torch.get_rng_state())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING] and not capfd.readouterr().err


def test_a_builtin_module_that_refuses_its_arguments_has_no_line_of_the_user() -> None:
    with pytest.raises(TraceError, match=r"the forward of Linear raises RuntimeError: .*\[3, 5\]") as caught:
        trace(nn.Linear(4, 2), (torch.ones(3, 5),))
    assert caught.value.where == "Linear"


def test_the_innermost_line_of_the_user_is_named() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Function(deeper), (X,))
    assert caught.value.where.startswith(culprit(branches).split("  #")[0])


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    with pytest.raises(TraceError, match=r"cannot be copied: cannot pickle .*lock") as caught:
        trace(model, (torch.randn(2, 4),))
    assert caught.value.where == "Linear" and "copy.deepcopy" in caught.value.remedy


def test_an_input_that_is_changed_and_needs_a_gradient() -> None:
    with pytest.raises(TraceError, match=r"args\[0\] is changed in place and needs a gradient") as caught:
        trace(Function(lambda self, x: x.mul_(self.w), w=nn.Parameter(torch.ones(4))), (torch.ones(4, 4),))
    assert "x = x + 1" in caught.value.remedy


@pytest.mark.parametrize("change", [lambda w: w.data.add_(1), torch.no_grad()(lambda w: w.add_(1))])
def test_a_parameter_that_is_changed_and_needs_a_gradient(change: Any) -> None:
    with pytest.raises(TraceError, match="w is changed in place and needs a gradient") as caught:
        trace(Function(lambda self, x: (x * self.w, change(self.w))[0], w=nn.Parameter(torch.ones(4))), (torch.ones(4, 4),))
    assert "between calls" in caught.value.remedy


def test_which_files_are_the_users() -> None:
    assert is_user_file("/home/me/torch/model.py") and is_user_file("/venv/lib/python3.11/site-packages/transformers/models/gpt2.py")
    assert not is_user_file(torch.nn.__file__) and not is_user_file(logging.__file__) and not is_user_file("<eval_with_key>.1")


def test_changes_of_python_objects_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean())
        self.steps.add_(1)
        return x * 2

    caplog.set_level(logging.INFO, "fxshard")
    model = Function(counts, seen=[])
    model.register_buffer("steps", torch.zeros(()))
    trace(model, (X,))
    assert "the forward of Function changes Python objects (self.seen)" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING and "keep its counts and state in buffers" in caplog.text
    caplog.clear()
    trace(nn.BatchNorm1d(4), (torch.randn(3, 4),))
    assert not caplog.text and not model.seen


class ReadsDTensors(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.ones(4)), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.read(self.weight) is None else x * self.weight


@pytest.mark.parametrize("name", ["placements", "_spec", "_local_tensor"])
def test_what_only_dtensors_have(name: str) -> None:
    """The model runs with DTensors, so that the remedy does not say that it never does."""
    with pytest.raises(TraceError, match=f"has no attribute '{name}'") as caught:
        trace(ReadsDTensors(lambda weight: getattr(weight, name)), (torch.ones(4),))
    assert "which have no placements" in caught.value.remedy and 'backend="fxshard"' in caught.value.remedy
