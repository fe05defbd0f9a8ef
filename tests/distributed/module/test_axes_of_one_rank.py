"""Meshes with axes of one rank, on two ranks: all placements mean the same there, and those that the user names stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import fxshard
from fxshard.plans.constraints import Forbid
from fxshard.runtime.calls.inputs import local_batch
from tests.distributed.backend.dtensor_cases import placements_of, results_and_gradients, whole
from tests.distributed.scenarios import on_ranks

pytestmark = pytest.mark.distributed

WORDS = {"dp_replicate": "ddp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp"}
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).double(), torch.randn(4, 6, 8, dtype=torch.float64)


def trains_as_on_one_device(model: nn.Module, reference: nn.Module, x: Tensor, *, steps: int = 2) -> None:
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    for _ in range(steps):
        for one, optimizer in ((model, mine), (reference, theirs)):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        have = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(have, q, rtol=1e-9, atol=1e-9)


def torchtitans_names() -> None:
    """Whichever axis has the two ranks."""
    for axis in range(4):
        shape = tuple(2 if k == axis else 1 for k in range(4))
        model, x = small()
        reference = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(WORDS))
        fxshard.parallelize(model, (x,), mesh, parallel=WORDS, compiler="eager")
        trains_as_on_one_device(model, reference, x)


def under_fully_shard() -> None:
    """torch's FSDP2 on the axis of two ranks beside one of replicas that has one, and on the axis of one rank."""
    for shape in ((1, 2), (2, 1)):
        model, x = small()
        reference = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh)
        held = list(model.parameters())
        fxshard.parallelize(model, (x,), mesh, compiler="eager")
        assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
        trains_as_on_one_device(model, reference, x)


def pins_and_arguments() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, x = small()
    reference = copy.deepcopy(model)
    pins = {"0.qkv.weight": [S0, S0], "1.out.weight": {"dp": S1}}
    options = {"pins": pins, "constraints": [Forbid("*.weight", R, axis="dp")], "output_layouts": "S(0)S(1)"}
    fxshard.parallelize(model, (local_batch(x, mesh),), mesh, compiler="eager", **options)
    given = distribute_tensor(x, mesh, [S1, S0])
    assert model(given).placements == (S0, S1)
    torch.testing.assert_close(model(given).full_tensor(), reference(x), rtol=1e-9, atol=1e-9)


def region(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    rows = local_map(lambda a, b: torch.relu(a @ b), out_placements=[S1, S0], in_placements=([S1, S0], [R, R]), redistribute_inputs=True)
    return rows(x, w) * 2


def on(placements: Any, *shape: int) -> Callable[[DeviceMesh], Tensor]:
    return lambda mesh: distribute_tensor(whole(*shape), mesh, placements).requires_grad_()


CALLS: dict[str, tuple[Callable[..., Any], tuple[Callable[[DeviceMesh], Tensor], ...]]] = {
    "redistributed": (lambda mesh, x: (x * 2).redistribute(placements=[S0, S1]), (on([S0, S0], 4, 6),)),
    "unsharded": (lambda mesh, x: (x.sum(0) * 2).redistribute(placements=[R, R]), (on([S0, S0], 4, 6),)),
    "local": (lambda mesh, x: torch.tanh((x * 2).to_local()) + 2, (on([S1, S0], 4, 6),)),
    "product": (lambda mesh, x, y: (x @ y).redistribute(placements=[S1, R]).to_local(), (on([S0, S1], 4, 6), on([R, S0], 6, 2))),
    "from_local": (lambda mesh, x: DTensor.from_local(x, mesh, [S1, S0]) * 2, (lambda mesh: whole(2, 6).requires_grad_(),)),
    "from_local, pending": (
        lambda mesh, x: (DTensor.from_local(x, mesh, [P, R]) * 2).redistribute(placements=[R, R]).to_local(),
        (lambda mesh: whole(2, 6).requires_grad_(),),
    ),
    "local_map": (region, (on([S1, S0], 4, 6), on([R, R], 6, 6))),
}


def calls_of_dtensors() -> None:
    """As eager DTensor: results, gradients, placements."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    for name, (function, arguments) in CALLS.items():
        try:
            call = lambda *args: function(mesh, *args)  # noqa: B023, E731
            compiled = torch.compile(call, backend="fxshard", fullgraph=True, options={"compiler": "eager", "timeout": 60.0})
            given, own = [a(mesh) for a in arguments], [a(mesh) for a in arguments]
            out, wanted = compiled(*given), call(*own)
            assert placements_of(out) == placements_of(wanted), (placements_of(out), placements_of(wanted))
            for have, want in zip(results_and_gradients(out, given), results_and_gradients(wanted, own), strict=True):
                torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        except Exception as e:
            wrong.append((name, type(e).__name__, str(e)[:600]))
        torch.compiler.reset()
    assert not wrong, wrong


found, test_two_ranks = on_ranks(2, torchtitans_names, under_fully_shard, pins_and_arguments, calls_of_dtensors)
