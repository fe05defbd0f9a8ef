"""Clipping by global norm on real ranks against one device, in float64: layouts that differ by parameter, uneven and empty shards, and
a parallelized module trained with Adam; torch's own clipping where it is right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import OptionError, RunError
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.calls.inputs import as_dtensor
from fxshard.runtime.simulate.shards import scatter
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed

SHAPES = [(5, 3), (4, 6), (3,), (), (1, 4)]
LINE = ["R R R R R", "S(0) S(1) S(0) R S(1)", "S(1) S(0) R R S(0)", "S(0) P R P R"]
SQUARE = ["RS(0) S(0)R RR RR RS(1)", "S(0)S(1) S(1)S(0) S(0)R RR S(0)S(1)", "S(0)S(0) S(1)S(1) RR RR PS(1)"]
ORDERS = (2.0, math.inf, 1.0, 3.0)


def wholes() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw, dtype=torch.float64) for s in SHAPES]


def alone(order: float, limit: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameters = [nn.Parameter(torch.zeros_like(x)) for x in wholes()]
    for p, x in zip(parameters, wholes(), strict=True):
        p.grad = x
    norm = nn.utils.clip_grad_norm_(parameters, limit, order)
    return norm, [p.grad for p in parameters if p.grad is not None]


def sharded(mesh: DeviceMesh, layouts: str) -> list[nn.Parameter]:
    made = []
    for x, text in zip(wholes(), layouts.split(), strict=True):
        layout, at = Layout.parse(text), tuple(mesh.get_coordinate() or ())
        cut = scatter(x, layout, as_mesh(mesh), at).clone()
        p = nn.Parameter(as_dtensor(torch.zeros_like(cut), mesh, layout, tuple(x.shape)))
        p.grad = as_dtensor(cut, mesh, layout, tuple(x.shape))
        made.append(p)
    return made


def assert_clipped(clip: Any, mesh: DeviceMesh, layouts: str, order: float, limit: float) -> None:
    norm, grads = alone(order, limit)
    parameters = sharded(mesh, layouts)
    have = clip(parameters, limit, order)
    have = have.full_tensor() if isinstance(have, DTensor) else have
    torch.testing.assert_close(have, norm, rtol=1e-9, atol=0, msg=f"{layouts}, order {order}")
    for p, want in zip(parameters, grads, strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), want, rtol=1e-9, atol=1e-12)


def meshes() -> list[tuple[DeviceMesh, list[str]]]:
    world = dist.get_world_size()
    found = [(init_device_mesh("cpu", (world,)), LINE)]
    return found if world < 4 else [*found, (init_device_mesh("cpu", (2, 2)), SQUARE)]


def any_layouts() -> None:
    for mesh, cases in meshes():
        for layouts in cases:
            for order in ORDERS:
                assert_clipped(fxshard.clip_grad_norm_, mesh, layouts, order, 0.5)
            assert_clipped(fxshard.clip_grad_norm_, mesh, layouts, 2.0, 1e6)


def torchs_own() -> None:
    """torch's clip_grad_norm_ is right for order 2 and gradients that are not pending."""
    for mesh, cases in meshes():
        for layouts in cases:
            if "P" not in layouts:
                assert_clipped(nn.utils.clip_grad_norm_, mesh, layouts, 2.0, 0.5)


def not_finite() -> None:
    mesh = meshes()[0][0]
    for bad, orders in ((math.nan, ORDERS), (math.inf, (2.0, math.inf))):
        for order in orders:
            parameters = sharded(mesh, LINE[1])
            grad = parameters[0].grad
            assert isinstance(grad, DTensor)
            if dist.get_rank() == 1:
                grad.to_local().fill_(bad)
            with pytest.raises(RunError, match=r"of the gradients is (nan|inf)"):
                fxshard.clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True)
            norm = float(fxshard.clip_grad_norm_(parameters, 1.0, order))
            assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def plain_beside_sharded() -> None:
    mesh = meshes()[0][0]
    (p, *_), q = sharded(mesh, LINE[1]), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    q.grad = torch.ones(3, dtype=torch.float64)
    norm = fxshard.clip_grad_norm_([p, q], 1.0)
    torch.testing.assert_close(norm, torch.cat([wholes()[0].flatten(), torch.ones(3, dtype=torch.float64)]).norm())
    assert float(fxshard.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)) == 0
    for order in (0, -1.0, math.nan, "two"):
        with pytest.raises(OptionError, match="norm_type is"):
            fxshard.clip_grad_norm_([p], 1.0, order)  # type: ignore[arg-type]  # the wrong type is what is tested


def training() -> None:
    """Three steps with clipping and Adam on a parallelized module: its parameters and Adam's state are those of one device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # noqa: E731
    one, x = make(), torch.randn(5, 4, dtype=torch.float64)
    model = make()
    model.load_state_dict(one.state_dict())
    pins = {"0.weight": "S(0)", "0.bias": "R", "2.weight": "S(1)"}
    model = fxshard.parallelize(model, (x,), mesh, compiler="eager", pins=pins)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, foreach=True) for m in (one, model)]
    for _ in range(3):
        for m, optimizer in zip((one, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            clip = nn.utils.clip_grad_norm_ if m is one else fxshard.clip_grad_norm_
            clip(m.parameters(), 0.5)
            optimizer.step()
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        assert isinstance(q, DTensor)
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-9, atol=1e-12)
        state = optimizers[1].state[q]["exp_avg"]
        assert state.placements == q.placements
        torch.testing.assert_close(state.full_tensor(), optimizers[0].state[p]["exp_avg"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_clipping(world: int, tmp_path: Path) -> None:
    scenarios = {f.__name__: f for f in (any_layouts, torchs_own, not_finite, plain_beside_sharded)}
    said = run_scenarios(scenarios | ({"training": training} if world == 2 else {}), world, tmp_path, seconds=90)
    assert not any(said.values()), "\n".join(v for v in said.values() if v)
