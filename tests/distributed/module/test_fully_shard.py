"""``parallelize`` on models that torch's ``fully_shard`` shards, on two ranks: it is taken off, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import Shard

from fxshard.errors import FxshardError, OptionError
from fxshard.runtime.calls.inputs import local_batch
from fxshard.runtime.module.module import parallelize
from tests.distributed.module.test_parallelize import mesh, same
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Rows(nn.Sequential):
    """Sizes that two ranks do not divide; the last weight has one row."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 1))

    def rows(self, x: Tensor) -> Tensor:
        return self(x)


def step_of(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def fully_sharded_by_torch() -> None:
    """parallelize takes fully_shard off, in the middle of a training, and while the root holds whole parameters. The optimiser goes on with
    the same parameters; the plan has FSDP's gathers and reductions."""
    torch.set_default_dtype(torch.float64)
    model, x = Rows(), torch.randn(4, 6)
    reference, rows = copy.deepcopy(model), x.chunk(2)[dist.get_rank()]
    fully_shard([model[0], model[2]], mesh=mesh())
    fully_shard(model, mesh=mesh())
    held = list(model.parameters())
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
    step_of(model, rows, mine)
    step_of(reference, x, theirs)
    with torch.no_grad():
        model(rows)
    batch = local_batch(rows, mesh())
    assert parallelize(model, (batch,), mesh(), compiler="eager") is model and type(model) is Rows and type(model[0]) is nn.Linear
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    for given in (batch, batch, x):
        same(step_of(model, given, mine), step_of(reference, x, theirs))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.placements == (Shard(0),)
        same(p.detach(), q.detach())
    kinds = [c.kind for c in model.forward.programs[0].plan.collectives]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == (6, 6)
    model.load_state_dict({n: t + 1 for n, t in copy.deepcopy(model).state_dict().items()})
    same(model[3].weight.detach(), reference[3].weight.detach() + 1)


def fully_sharded_with_more_than_layouts() -> None:
    """Refused by name before anything changes."""
    x, two_axes = torch.randn(4, 6), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    cases = {
        "has an mp_policy": (dict(mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), lambda m: None),
        "has an offload_policy": (dict(mesh=mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)), lambda m: None),
        "has a gradient_divide_factor": (dict(mesh=mesh()), lambda m: m.set_gradient_divide_factor(1.0)),
        "has set_requires_gradient_sync": (dict(mesh=mesh()), lambda m: m.set_requires_gradient_sync(False)),
        "has communication of its own": (dict(mesh=mesh()), lambda m: m.set_custom_all_gather(OwnGather())),
        "has an all_reduce_hook": (dict(mesh=two_axes), lambda m: m.set_all_reduce_hook(lambda x: None)),
        "has register_fsdp_forward_method of rows": (dict(mesh=mesh()), lambda m: register_fsdp_forward_method(m, "rows")),
        "has gradients that are not reduced yet": (dict(mesh=mesh()), with_pending_gradients),
        "is on DeviceMesh": ({}, lambda m: None),
    }
    for said, (options, change) in cases.items():
        model = Rows()
        fully_shard(model, **options)
        change(model)
        with pytest.raises(OptionError, match=f"fully_shard of the model {said}"):
            parallelize(model, (x,), options.get("mesh", mesh()), compiler="eager")
        assert isinstance(model, FSDPModule)
    model = Rows()
    fully_shard(model, mesh=mesh())
    if dist.get_rank() == 0:  # the other rank has no reason of its own
        model.set_requires_gradient_sync(False)
    with pytest.raises(FxshardError, match="set_requires_gradient_sync"):
        parallelize(model, (x,), mesh(), compiler="eager")
    assert isinstance(model, FSDPModule)


def fully_sharded_around() -> None:
    """A part of what one fully_shard shards cannot be taken out of it; a part that has its own can, also where the root has another."""
    x, outer = torch.randn(4, 6), Rows()
    fully_shard(outer, mesh=mesh())
    with pytest.raises(OptionError, match="the parameters of the model belong to a fully_shard of modules that are not all given"):
        parallelize(outer[0], (x,), mesh(), compiler="eager")
    two = nn.ModuleList((Rows(), Rows()))
    fully_shard(list(two), mesh=mesh())
    with pytest.raises(OptionError, match="the parameters of 0 belong to a fully_shard"):
        parallelize(two[0], (x,), mesh(), compiler="eager")
    torch.set_default_dtype(torch.float64)
    outer, x = Rows(), torch.randn(4, 6)
    reference = copy.deepcopy(outer[0])
    fully_shard(outer[0], mesh=mesh())
    fully_shard(outer, mesh=mesh())
    same(parallelize(outer[0], (x,), mesh(), compiler="eager")(x).detach(), reference(x).detach())


def fully_sharded_again_after_an_error() -> None:
    """If planning fails, fully_shard is as it was, with its hooks in their order: it trains on, and a later call takes it off."""
    torch.set_default_dtype(torch.float64)
    model, x = Rows(), torch.randn(4, 6)
    reference, rows = copy.deepcopy(model), x.chunk(2)[dist.get_rank()]
    model.register_forward_pre_hook(lambda module, args: heard.append("own"))
    heard: list[str] = []
    fully_shard([model[0], model[2]], mesh=mesh())
    fully_shard(model, mesh=mesh())
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
    before = [list(part._forward_pre_hooks) + list(part._forward_hooks) for part in model.modules()]
    for said, options in (("matches no", {"pins": {"nothing": "R"}}), ("raises", {})):
        with pytest.raises(FxshardError, match=said):
            parallelize(model, (x if options else x[:, :3],), mesh(), compiler="eager", **options)
        assert isinstance(model, FSDPModule) and isinstance(model[0], FSDPModule) and isinstance(model[2], FSDPModule)
        assert before == [list(part._forward_pre_hooks) + list(part._forward_hooks) for part in model.modules()]
        step_of(model, rows, mine)
        step_of(reference, x, theirs)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach())
    assert heard == ["own", "own"]
    parallelize(model, (x,), mesh(), compiler="eager")
    same(step_of(model, x, mine), step_of(reference, x, theirs))


class OwnGather(DefaultAllGather):
    """As torch's own."""


def with_pending_gradients(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model(torch.randn(4, 6)).sum().backward()
    model.set_requires_gradient_sync(True)


found, test_two_ranks = two_ranks(
    fully_sharded_by_torch, fully_sharded_with_more_than_layouts, fully_sharded_around, fully_sharded_again_after_an_error
)
