"""Objects as arguments of a parallelized module, in one process: if the model changes one, the caller's object changes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fxshard


@dataclass
class Layer:
    keys: torch.Tensor | None = None
    length: int = 0


@dataclass
class Memory:
    layers: list[Layer] = field(default_factory=list)


class Remembers(nn.Module):
    """Appends its result to the given memory, or to a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, memory: Memory | None = None) -> tuple[torch.Tensor, Memory]:
        memory = Memory() if memory is None else memory
        if not memory.layers:
            memory.layers.append(Layer(x.new_zeros(0, 4)))
        one = memory.layers[0]
        one.keys = torch.cat([one.keys, self.layer(x)])
        one.length += x.shape[0]
        return one.keys.sum(), memory


class Writes(nn.Module):
    """Writes into a tensor of the given memory."""

    def forward(self, x: torch.Tensor, memory: Memory) -> Memory:
        memory.layers[0].keys[: x.shape[0]] = x
        return memory


def parallelized(model: nn.Module, args: Any, mesh: DeviceMesh, **options: Any) -> Any:
    return fxshard.parallelize(copy.deepcopy(model), args, mesh, train=False, compiler="eager", cache=False, **options)


@torch.no_grad()
def test_the_callers_object_grows_and_is_returned(mesh: DeviceMesh) -> None:
    model, x = Remembers(), torch.randn(3, 4)
    sharded = parallelized(model, (x,), mesh)
    mine, want = Memory(), Memory()
    for _ in range(2):
        total, returned = sharded(x, mine)
        torch.testing.assert_close(total, model(x, want)[0])
        assert returned is mine and mine.layers[0].length == want.layers[0].length
        torch.testing.assert_close(mine.layers[0].keys, want.layers[0].keys)
        assert type(mine.layers[0].keys) is torch.Tensor
    first = mine.layers[0]
    sharded(x, mine)
    assert mine.layers[0] is first and len(mine.layers) == 1


@torch.no_grad()
def test_the_same_program_serves_other_objects_of_the_same_state(mesh: DeviceMesh) -> None:
    model, x = Remembers(), torch.randn(3, 4)
    sharded = parallelized(model, (x, Memory()), mesh)
    results = [sharded(x, Memory())[1] for _ in range(2)]
    assert results[0] is not results[1] and results[0].layers[0].keys is not results[1].layers[0].keys
    assert len(sharded.forward.programs) == 1
    sharded(x, Memory([Layer(torch.ones(2, 4), 5)]))
    assert len(sharded.forward.programs) == 2


@torch.no_grad()
def test_tensors_are_changed_in_place(mesh: DeviceMesh) -> None:
    x, tensor = torch.randn(2, 4), torch.zeros(3, 4)
    memory = Memory([Layer(tensor)])
    returned = parallelized(Writes(), (x, memory), mesh)(x, memory)
    assert returned is memory and memory.layers[0].keys is tensor
    torch.testing.assert_close(tensor, torch.cat([x, torch.zeros(1, 4)]))


@torch.no_grad()
def test_a_tensor_in_an_object_keeps_its_layout(mesh: DeviceMesh) -> None:
    """A glob asks for the layout once; other outputs stay plain tensors."""
    model, x = Remembers(), torch.randn(3, 4)
    sharded = parallelized(model, (x,), mesh, output_layouts={"*.keys": "S(1)"})
    total, memory = sharded(x)
    for length in (3, 6):
        keys = memory.layers[0].keys
        assert isinstance(keys, DTensor) and keys.placements == (Shard(1),) and keys.shape == (length, 4)
        assert type(total) is torch.Tensor
        total, memory = sharded(x, memory)
    whole = Memory([Layer(memory.layers[0].keys.redistribute(placements=[Replicate()]), 9)])
    assert sharded(x, whole)[1].layers[0].keys.placements == (Shard(1),)  # in the layout that was asked for


def test_layouts_that_name_nothing_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(fxshard.FxshardError, match="values"):
        parallelized(Remembers(), (torch.randn(3, 4),), mesh, output_layouts={"*.values": "S(1)"})
    with pytest.raises(fxshard.FxshardError, match="two arguments hold the same Layer"):
        one = Layer(torch.ones(2, 4))
        parallelized(Remembers(), (torch.randn(3, 4), Memory([one])), mesh, example_kwargs={"other": Memory([one])})


@torch.no_grad()
def test_a_size_stored_as_a_number_is_that_of_the_call(mesh: DeviceMesh) -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, layer: Layer) -> Layer:
            layer.keys, layer.length = x * 2, x.shape[0]
            return layer

    sharded = parallelized(Counts(), (torch.ones(2, 4), Layer()), mesh)
    assert [sharded(torch.ones(n, 4), Layer()).length for n in (2, 3, 4)] == [2, 3, 4]


class Attends(nn.Module):
    """Appends a token to the keys of each row, and sums them with a mask."""

    def forward(self, x: torch.Tensor, memory: Memory, mask: torch.Tensor) -> torch.Tensor:
        one = memory.layers[0]
        one.keys = torch.cat([one.keys, x], 1)  # type: ignore[list-item]
        return (one.keys * mask.unsqueeze(-1)).sum(1)


@torch.no_grad()
def test_a_mask_as_long_as_the_batch_by_chance(mesh: DeviceMesh) -> None:
    """Mask and keys get longer and the batch does not, although both are 6 in the first call."""
    model, rows = Attends(), 6
    sharded = parallelized(model, (torch.randn(rows, 1, 4), Memory([Layer(torch.randn(rows, 5, 4))]), torch.ones(rows, 6).long()), mesh)
    keys = torch.randn(rows, 5, 4)
    mine, wanted = Memory([Layer(keys)]), Memory([Layer(keys)])
    for length in range(6, 10):
        x, mask = torch.randn(rows, 1, 4), torch.randint(0, 2, (rows, length))
        torch.testing.assert_close(sharded(x, mine, mask), model(x, wanted, mask))
    assert len(sharded.forward.programs) == 1
