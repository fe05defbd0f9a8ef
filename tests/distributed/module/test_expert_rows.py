"""Rows that travel to the ranks of their experts on real processes: training steps equal those of one device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fxshard
from fxshard.runtime.ranks.record import record_collectives
from tests.distributed.scenarios import run_scenarios, two_ranks
from tests.mixture import Mixture

pytestmark = pytest.mark.distributed


def trained(compiler: str, experts: int, tokens: int) -> None:
    """Each rank has its own tokens and experts, uneven where they do not divide; what ran is what the program says."""
    model, x = Mixture(experts, 1).double(), torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    pins = {"up": "S(0)", "down": "S(0)", "to_experts*": ("P(experts)", "P(experts)")}
    fxshard.parallelize(model, (x,), mesh, compiler=compiler, pins=pins)
    assert isinstance(model.up, DTensor) and model.up.placements == (Shard(0),)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    for _ in range(2):
        with record_collectives() as issued:
            losses = []
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                loss = one(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        assert [c.kind for c in issued if c.kind in ("dispatch", "combine")] == ["dispatch", "combine", "dispatch"]
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.allclose(whole, alone.get_parameter(name), rtol=1e-9, atol=1e-12), name


def on_two_axes() -> None:
    """As above on 2 x 2 ranks: uneven tokens, and experts that both axes shard."""
    model, x = Mixture(5, 2).double(), torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    pins = {"up": "S(0)S(0)", "down": "S(0)S(0)", "to_experts*": ("P(experts)P(experts)",) * 2}
    fxshard.parallelize(model, (x,), mesh, compiler="eager", pins=pins)
    with record_collectives() as issued:
        for one in (model, alone):
            one(x).square().mean().backward()
    axes = [(c.kind, c.axis) for c in issued if c.kind in ("dispatch", "combine")]
    assert axes[:4] == [("dispatch", "ep"), ("dispatch", "dp"), ("combine", "dp"), ("combine", "ep")]
    for name, parameter in model.named_parameters():
        grad, want = parameter.grad, alone.get_parameter(name).grad
        assert grad is not None and want is not None
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert torch.allclose(whole, want, rtol=1e-9, atol=1e-9 * float(want.abs().max())), name


def even() -> None:
    trained("eager", 4, 64)


def uneven() -> None:
    trained("eager", 5, 7)


def compiled() -> None:
    trained("inductor", 4, 64)


found, test_two_ranks = two_ranks(even, uneven, compiled)


def test_four_ranks(tmp_path: Path) -> None:
    said = run_scenarios({"on_two_axes": on_two_axes}, 4, tmp_path)["on_two_axes"]
    assert not said, said
