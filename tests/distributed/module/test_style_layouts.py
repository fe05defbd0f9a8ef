"""fxshard.parallelize_module: layouts that styles name by halves, or that whole values cannot have, on two ranks; float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.func import functional_call

import fxshard
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Its last module is ``norm``."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), norm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def made(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind().double()


def both(plan: Any, kind: Callable[[], nn.Module] = Net) -> tuple[Any, Any]:
    """(a model with fxshard's function applied, one with torch's)."""
    return fxshard.parallelize_module(made(kind), mesh(), plan, compiler="eager"), parallel.parallelize_module(made(kind), mesh(), plan)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def own(x: Tensor, dim: int) -> Tensor:
    return x.chunk(2, dim)[dist.get_rank()]


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same_training(have: nn.Module, want: nn.Module, *args: Tensor) -> None:
    """Results in the same form, and equal gradients."""
    outs = have(*args), want(*args)
    assert isinstance(outs[0], DTensor) == isinstance(outs[1], DTensor), outs
    torch.testing.assert_close(*map(whole, outs))
    for out in outs:
        whole(out).square().sum().backward()
    for name, p in want.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(whole(have.get_parameter(name).grad), whole(p.grad), msg=name)


def a_norm_returns_its_shard() -> None:
    """``SequenceParallel(use_local_output=True)`` last: the result is the rank's part of the sequence."""
    for norm in (nn.LayerNorm, nn.RMSNorm):
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(use_local_output=True),
        }
        have, want = both(plan, lambda norm=norm: Net(norm))
        same_training(have, want, own(numbers(2, 4, 6), 1))
        torch.testing.assert_close(have(own(numbers(2, 6, 6), 1)), want(own(numbers(2, 6, 6), 1)))  # another size


class Rows(ParallelStyle):
    """A user's style: takes a rank's rows, and returns its part of what comes out."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def enter(part: nn.Module, inputs: Any, device_mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], device_mesh, [Shard(0)], run_check=False)

        return distribute_module(module, device_mesh, None, enter, lambda part, outputs, device_mesh: outputs.to_local())


class Computed(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def a_part_of_what_is_computed_from_rows() -> None:
    """A layout that follows from a named one; where eager DTensor would move the value it is not known."""
    x = numbers(4, 2, 6)
    for function in (lambda x: x.softmax(-1) * 2, lambda x: x.transpose(0, 1), lambda x: x.sum(2), lambda x: x.flatten(0, 1)):
        have, want = both({"inner": Rows()}, lambda f=function: Holder(f))
        torch.testing.assert_close(have(own(x, 0)), want(own(x, 0)))
    for function in (lambda x: x.softmax(0), lambda x: x.sum(0), lambda x: x.cumsum(0)):
        have, _ = both({"inner": Rows()}, lambda f=function: Holder(f))
        with pytest.raises(fxshard.FxshardError, match="returned as the local shard of a DTensor whose layout the model does not name"):
            have(own(x, 0))


class Holder(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.scale = Computed(function), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Product()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, k=y)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.up(x * k)


def a_shard_beside_a_whole_argument() -> None:
    """Until the trace knows which arguments are shards, their sizes do not fit together."""
    x, y = numbers(4, 6), numbers(4, 6) + 1
    for layouts, args in (
        ((Shard(0), Replicate()), (own(x, 0), y)),
        ((Replicate(), Shard(0)), (x, own(y, 0))),
        ((Shard(0), Shard(1)), (own(x, 0), own(y, 1))),
    ):
        style = PrepareModuleInput(
            input_layouts=layouts[:1],
            desired_input_layouts=(Replicate(),),
            input_kwarg_layouts={"k": layouts[1]},
            desired_input_kwarg_layouts={"k": Replicate()},
        )
        plan = {"inner": style, "inner.up": ColwiseParallel(use_local_output=False)}
        same_training(*both(plan, Keywords), *args)


def pending_sums() -> None:
    """A rank's part of a sum cannot be handed out; as a DTensor between two modules it can be."""
    pending = {"up": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial())}
    for plan, said in (
        (pending, r"RowwiseParallel\(output_layouts=Partial\(\)\) of up hands out each rank's part of a sum(.|\n)*Replicate\(\) or Shard"),
        ({"norm": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Partial())}, r"desired_output_layouts=.* of norm"),
        (RowwiseParallel(output_layouts=Partial(), use_local_output=False), "of the whole module hands out"),
    ):
        with pytest.raises(fxshard.FxshardError, match=said):
            fxshard.parallelize_module(made(), mesh(), plan)
    for plan, said in (
        ({"up": PrepareModuleInput(input_layouts=Partial(), desired_input_layouts=Replicate())}, "from_local declares a partial sum"),
        ({"norm": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(0))}, "from_local declares a partial sum"),
        ({"norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Partial(), use_local_output=False)}, "returned"),
    ):
        with pytest.raises(fxshard.FxshardError, match=rf"{said}(.|\n)*module (up|norm)(.|\n)*in place of Partial\(\)"):
            fxshard.parallelize_module(made(), mesh(), plan, compiler="eager")(numbers(4, 6))
    torchs = parallel.parallelize_module(made(), mesh(), pending)
    with pytest.raises(fxshard.FxshardError, match=r"to_local hands out a pending sum(.|\n)*module up"):
        fxshard.parallelize(torchs, (numbers(4, 6),), mesh(), compiler="eager")
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial(), use_local_output=False),
        "1": RowwiseParallel(input_layouts=Partial()),
    }
    same_training(*both(plan, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))), numbers(4, 6))


def functional_call_before_the_first_call() -> None:
    """It is refused by name; planned for before, it gives what it gives on one device."""
    plan, x = {"up": ColwiseParallel(), "down": RowwiseParallel()}, numbers(4, 6)

    def called(model: nn.Module) -> Tensor:
        return functional_call(model, {name: p * 1.5 for name, p in model.named_parameters()}, (x,))

    model, _ = both(plan)
    with pytest.raises(fxshard.FxshardError, match=r"is a functional_call, with a value in place of parameter up.weight(.|\n)*once before"):
        called(model)
    model(x)
    torch.testing.assert_close(called(model), called(made()))
    example = fxshard.parallelize_module(made(), mesh(), plan, example_args=(x,), compiler="eager")
    torch.testing.assert_close(called(example), called(made()))


found, test_two_ranks = two_ranks(
    a_norm_returns_its_shard,
    a_part_of_what_is_computed_from_rows,
    a_shard_beside_a_whole_argument,
    pending_sums,
    functional_call_before_the_first_call,
)
