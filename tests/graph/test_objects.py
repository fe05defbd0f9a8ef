"""Objects are flattened and rebuilt: their state is kept, another state gives another tree spec, each tensor has a path."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard.errors import OptionError
from fxshard.graph.objects import is_openable, leaves_in_objects, on_cpu, open_call


class Plain:
    def __init__(self, **state: Any) -> None:
        vars(self).update(state)


@dataclass(slots=True)
class Slots:
    a: Any
    b: Any = 1


class Derived(Slots):
    pass


class Private:
    __slots__ = ("__hidden",)


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("kind", [Plain, Slots, Derived])
def test_objects_of_python_classes_are_taken_apart(kind: type) -> None:
    assert is_openable(kind)


@pytest.mark.parametrize(
    "kind", [Private, Kind, nn.Linear, torch.Tensor, torch.Generator, ValueError, type, dict, type(Plain.__init__), int]
)
def test_objects_of_other_classes_are_not(kind: type) -> None:
    assert not is_openable(kind)


def taken(*args: Any) -> tuple[list[Any], pytree.TreeSpec, list[str]]:
    call = open_call(args, {})[:2]
    leaves, spec = pytree.tree_flatten(call)
    return leaves, spec, [pytree.keystr(path[1:]) for path, _ in pytree.tree_flatten_with_path(call)[0]]


def test_a_rebuilt_object_equals_the_original() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    inner = Plain(y=y, n=float("nan"), back=None)
    inner.back = inner  # a cycle
    given = Plain(x=[x, inner], pair=(y, "text"), slots=Derived(x, {"k": y}), kind=Kind.ONE)
    leaves, spec, names = taken(given, x)
    assert [id(t) for t in leaves] == [id(x), id(y), id(x)]
    assert names == ["[0].x[0]", "[0].x[1].y", "[1]"] and leaves_in_objects(spec) == {0, 1}
    (made, _), _ = pytree.tree_unflatten(["x", "y", None], spec)
    assert made is not given and made.x[0] == "x" and made.x[1].back is made.x[1] and made.pair == ("y", "text")
    assert type(made.slots) is Derived and made.slots.a == "x" and made.slots.b == {"k": "y"} and made.kind is Kind.ONE


def test_another_state_gives_another_spec() -> None:
    def of(**state: Any) -> pytree.TreeSpec:
        return taken(Plain(**state))[1]

    x, opaque = torch.ones(2), object()
    assert of(x=x, n=1, o=opaque) == of(x=torch.zeros(5), n=1, o=opaque)
    others = [of(x=x, n=1.0, o=opaque), of(x=x, n=True, o=opaque), of(x=None, n=1, o=opaque), of(x=x, n=1, o=object()), of(x=x, n=1)]
    assert of(x=x, n=1, o=opaque) not in others
    assert of(x=x, y=x) != of(x=x, y=torch.ones(2))  # one tensor held twice differs from two tensors


def test_devices_are_replaced_by_the_cpu() -> None:
    spec = taken(Plain(x=torch.ones(2), device=torch.device("meta")))[1]
    assert pytree.tree_unflatten([0], on_cpu(spec))[0][0].device == torch.device("cpu")
    assert pytree.tree_unflatten([0], spec)[0][0].device == torch.device("meta")


def test_one_object_in_two_arguments_is_refused() -> None:
    shared = Plain()
    with pytest.raises(OptionError, match="two arguments hold the same Plain"):
        open_call((Plain(a=shared), Plain(a=shared)), {})
    again = open_call(open_call((Plain(a=shared),), {})[0], {})  # a call that is already opened can be opened again
    assert taken(*again[0])[0] == []
