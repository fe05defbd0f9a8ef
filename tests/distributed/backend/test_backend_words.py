"""One-word plans as an option of the backend: they say how inputs are sharded, and parameters must have the layouts that they say."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
import fxshard.runtime.backend.backend as backend
from fxshard.errors import ConstraintError, OptionError
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()


def data_parallel() -> None:
    """The batch is sharded although it is a plain tensor; parameters are plain and stay whole."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, x = net(), torch.rand(8, 6, dtype=torch.float64)
    reference, seen = copy.deepcopy(model), []
    real = backend.plan_graph

    def planned(*args: object) -> object:
        seen.append(real(*args))  # type: ignore[arg-type]
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "plan_graph", planned)
        options = {"mesh": device_mesh, "compiler": "eager", "parallel": {"dp": "ddp"}, "cache": False}
        loss = F.mse_loss(torch.compile(model, backend="fxshard", options=options)(x), x[:, :4])
    loss.backward()
    F.mse_loss(reference(x), x[:, :4]).backward()
    if dist.get_rank() == 0:  # it plans for both
        (plan,) = seen
        assert {str(plan.layout_of(end.name)) for end in plan.inputs if end.kind == "input"} == {"S(0)"}
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def after_another_layer() -> None:
    """The input needs a gradient, which comes back whole, through Inductor too."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for compiler, word in (("eager", "ddp"), ("inductor", "ddp"), ("eager", "cp")):
        first, model, x = nn.Linear(6, 6).double(), net(), torch.rand(5, 4, 6, dtype=torch.float64)
        theirs, reference = copy.deepcopy(first), copy.deepcopy(model)
        options = {"mesh": device_mesh, "compiler": compiler, "parallel": {"dp": word}}
        compiled = torch.compile(model, backend="fxshard", options=options)
        for rows in (4, 5):
            compiled(first(x[:rows])).sin().sum().backward()
            reference(theirs(x[:rows])).sin().sum().backward()
        for p, q in zip((*first.parameters(), *model.parameters()), (*theirs.parameters(), *reference.parameters()), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def refused() -> None:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for word, said in (("fsdp", r"asks for parameter 0.weight in S\(0\) on 'dp', but it is a plain tensor"), ("tp", "sharded on 'dp'")):
        options = {"mesh": device_mesh, "compiler": "eager", "parallel": {"dp": word}}
        with pytest.raises(ConstraintError, match=said):
            torch.compile(net(), backend="fxshard", options=options)(torch.rand(8, 6, dtype=torch.float64))
    with pytest.raises(OptionError, match="the mesh has no axis 'tp'"):
        torch.compile(net(), backend="fxshard", options={"mesh": device_mesh, "parallel": {"tp": fxshard.TensorParallel()}})(
            torch.rand(8, 6)
        )


found, test_two_ranks = two_ranks(data_parallel, after_another_layer, refused)
