"""The fast paths of a call: reading attributes of modules, flattening arguments, kernels below autograd, local tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import held, kernels_only, locals_of
from fxshard.runtime.calls.attributes import AttributeReader, changed_attributes
from fxshard.runtime.calls.inputs import flatten_call


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale, self.mode, self.table, self.last = 1, None, [1], None


def swap(model: Any) -> None:
    """Replaces an attribute by one of another name, with the same type, value and position."""
    del model.last
    model.other = None


CHANGES: dict[str, tuple[Callable[[Any], Any], set[tuple[int, str]]]] = {
    "a value": (lambda m: setattr(m, "scale", 2), {(0, "scale")}),
    "a value of a child": (lambda m: setattr(m.inner, "in_features", 3), {(1, "in_features")}),
    "a type": (lambda m: setattr(m, "mode", "fast"), {(0, "mode")}),
    "a plain value becomes a list": (lambda m: setattr(m, "scale", [1]), {(0, "scale")}),
    "a list becomes a plain value": (lambda m: setattr(m, "table", 1), {(0, "table")}),
    "added": (lambda m: setattr(m, "new", 0.5), {(0, "new")}),
    "removed": (lambda m: delattr(m, "scale"), {(0, "scale")}),
    "a name": (swap, {(0, "last"), (0, "other")}),
    "training": (lambda m: m.eval(), {(0, "training"), (1, "training")}),
    "a list, which is not compared": (lambda m: setattr(m, "table", [2]), set()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_an_attribute_is_seen(name: str) -> None:
    model = Block()
    reader = AttributeReader(model)
    before = reader.current()
    assert reader.current() is before
    change, want = CHANGES[name]
    change(model)
    now = reader.current()
    assert changed_attributes(before, now) == want and changed_attributes(now, AttributeReader(model).current()) == set()


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((torch.ones(1), 2, None), {}),
    ((torch.ones(1),), {"b": True, "a": "x"}),
    (([torch.ones(1), 2],), {"a": None}),
    ((OrderedDict(x=1),), {"a": {"b": (1, 2)}}),
]


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_a_call_is_flattened_as_torch_does(call: int) -> None:
    args, kwargs = CALLS[call]
    leaves, spec = flatten_call(args, kwargs)
    want, same = pytree.tree_flatten((args, kwargs))
    assert spec == same and all(a is b for a, b in zip(leaves, want, strict=True))
    assert flatten_call(args, dict(reversed(kwargs.items())))[1] == pytree.tree_flatten((args, dict(reversed(kwargs.items()))))[1]


def test_kernels_see_neither_autograd_nor_autocast() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).requires_grad and (x @ x).dtype == torch.bfloat16
        with kernels_only():
            assert not (x @ x).requires_grad and (x @ x).dtype == torch.float32
        assert (x @ x).requires_grad and (x @ x).dtype == torch.bfloat16


def test_a_parameter_is_found_where_it_has_moved() -> None:
    """``parametrize`` takes a parameter out of the module's own table."""
    layer = nn.Linear(2, 2)
    assert held(layer, "weight") is layer.weight
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    assert torch.equal(held(layer, "weight"), layer.weight)


class Marked(torch.Tensor):
    """A tensor subclass other than DTensor."""


def test_the_local_tensors_of_a_call() -> None:
    values = [torch.ones(2, 3), nn.Parameter(torch.ones(2, 3)), torch.ones(3, 2).t(), torch.ones(2, 3).as_subclass(Marked)]
    found = locals_of(values)
    assert all(a is b for a, b in zip(found, [*values[:2], found[2], values[3]], strict=True))
    assert found[2].is_contiguous() and torch.equal(found[2], values[2])
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        shared = distribute_tensor(torch.arange(6).view(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        own, turned = locals_of([shared, shared.t()])
    finally:
        dist.destroy_process_group()
    assert type(own) is type(turned) is torch.Tensor and own.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.is_contiguous() and turned.tolist() == [[0, 3], [1, 4], [2, 5]]
