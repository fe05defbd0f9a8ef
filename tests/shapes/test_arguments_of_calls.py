"""Dynamic dims of calls that pass other arguments than the example, and dims marked with ``mark_dynamic``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxshard
from fxshard.errors import OptionError
from fxshard.shapes import DynamicDim, dynamic_dims
from tests.torch_versions import SINCE_2_15


class Optional(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, batch: object = None) -> torch.Tensor:
        return x if y is None else x + y


X, Y = torch.zeros(4, 8), torch.zeros(4, 8)
B = {0: "b"}
GIVEN = [{"x": B, "y": B}, (B, B), {"args[0]": B, "args[1]": B}, {"args[0]": B, "kwargs['y']": B}]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("args", "kwargs", "places"),
    [
        ((X, Y), {}, ["args[0]", "args[1]"]),
        ((X,), {"y": Y}, ["args[0]", "kwargs['y']"]),
        ((), {"y": Y, "x": X}, ["kwargs['x']", "kwargs['y']"]),
        ((X,), {}, ["args[0]"]),
        ((X, None), {}, ["args[0]"]),
    ],
)
def test_arguments_that_a_call_lacks_are_ignored(
    given: object, args: tuple[object, ...], kwargs: dict[str, object], places: list[str]
) -> None:
    for call in ("example", "later"):
        found = dynamic_dims(Optional(), args, kwargs, given, call=call)  # type: ignore[arg-type]
        assert found == (DynamicDim("b", tuple((path, 0) for path in places), 4),)
    if len(places) < 2:
        with pytest.raises(OptionError):
            dynamic_dims(Optional(), args, kwargs, given)


def test_names_of_unknown_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="there is no argument 'bath'; did you mean 'batch'"):
        dynamic_dims(Optional(), (X,), {}, {"x": B, "bath": B}, call="example")
    with pytest.raises(OptionError, match=r"there is no argument 'args\[2\]'"):
        dynamic_dims(Optional(), (X,), {}, (B, None, B), call="example")


def test_only_later_calls_may_lack_parts_of_containers() -> None:
    given = {"batch": {"ids": B, "labels": B}, "x": None}
    (dim,) = dynamic_dims(Optional(), (X,), {"batch": {"ids": X}}, given, call="later")
    assert dim.places == (("kwargs['batch']['ids']", 0),)
    assert dynamic_dims(Optional(), (X,), {}, {"batch": {"ids": B}, "kwargs['batch']['labels']": B}, call="example") == ()
    with pytest.raises(OptionError, match="does not describe"):
        dynamic_dims(Optional(), (X,), {"batch": {"ids": X}}, given, call="example")


def test_a_range_holds_even_if_its_argument_is_missing() -> None:
    (dim,) = dynamic_dims(Optional(), (X,), {}, {"x": B, "y": {0: Dim("b", max=8)}}, call="later")
    assert (dim.least, dim.most) == (1, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": {0: Dim("a", max=8)}, "args[0]": {0: Dim("c", max=9)}}, "dim 0 of args.0. has two names, 'a' and 'c'"),
        (({0: Dim("a", max=8)}, {0: Dim("a", max=9)}), "'a' is from 1 to 8 in one place and from 1 to 9 in another"),
        (({0: Dim("a", max=8)}, {0: Dim("a")}), "'a' is from 1 to 8 in one place and at least 1 in another"),
        ({"x": {0: Dim("a", max=8)}, "args[0]": {0: Dim("a", max=9)}}, "'a' is from 1 to 8 in one place"),
        ({"x": {0: "a", -2: "c"}}, "has two names"),
    ],
)
def test_contradictions_are_refused(given: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        dynamic_dims(Optional(), (X, Y), {}, given)


def test_a_dim_given_twice_is_one_dim() -> None:
    (dim,) = dynamic_dims(Optional(), (X,), {}, {"x": {0: Dim("a", max=8)}, "args[0]": {0: "a"}})
    assert dim == DynamicDim("a", (("args[0]", 0),), 4, 1, 8)


def marked(*marks: tuple[int, int | None, int | None], shape: tuple[int, ...] = (4, 8)) -> torch.Tensor:
    x = torch.zeros(shape)
    for dim, least, most in marks:
        torch._dynamo.mark_dynamic(x, dim, min=least, max=most)
    return x


"""Whether a second mark of a dim takes the place of the first, as in torch 2.15, or narrows it."""


def test_marks_have_ranges() -> None:
    assert dynamic_dims(Optional(), (marked((0, 2, 8)),), {}) == (DynamicDim("args_0_0", (("args[0]", 0),), 4, 2, 8),)
    (dim,) = dynamic_dims(Optional(), (marked((0, None, 8), (0, 3, None)),), {})
    assert (dim.least, dim.most) == (3, None if SINCE_2_15 else 8)
    (dim,) = dynamic_dims(Optional(), (marked((0, 2, 8)),), {}, {"x": {0: Dim("b", max=16)}})
    assert (dim.name, dim.least, dim.most) == ("b", 2, 8)
    with pytest.raises(OptionError, match="is 4, it must be from 5 to 8"):
        dynamic_dims(Optional(), (marked((0, 5, 8)),), {})


def test_a_memory_limit_holds_at_the_max_of_a_mark() -> None:
    plan = fxshard.plan(nn.Linear(8, 8), (marked((0, 2, 8)),), fxshard.Mesh({"dp": 2}), cache=False, memory_limit="1MB")
    assert plan.memory_sizes == {"args_0_0": 8}


def test_marks_of_equal_size_in_different_tensors_are_one_dim() -> None:
    both = ((0, None, None), (1, None, 16))
    assert dynamic_dims(Optional(), (marked(*both), marked(*both)), {}) == (
        DynamicDim("args_0_0", (("args[0]", 0), ("args[1]", 0)), 4),
        DynamicDim("args_0_1", (("args[0]", 1), ("args[1]", 1)), 8, 1, 16),
    )
    square = marked((0, None, None), (1, None, None), shape=(4, 4))
    assert [dim.places for dim in dynamic_dims(Optional(), (square, square), {})] == [
        (("args[0]", 0), ("args[1]", 0)),
        (("args[0]", 1), ("args[1]", 1)),
    ]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(16, 16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner(tokens).flatten(0, 1), targets.flatten())


def test_marks_on_tokens_and_targets() -> None:
    tokens, targets = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    for x in (tokens, targets):
        torch._dynamo.mark_dynamic(x, (0, 1))
    plan = fxshard.plan(Loss(), (tokens, targets), fxshard.Mesh({"dp": 2}), cache=False)
    assert plan.at(args_0_0=8, args_0_1=64).objective > 0
