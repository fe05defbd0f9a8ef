"""Packed weights on two ranks: training steps, DTensors, state dicts and checkpoints equal those of one device."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fxshard
from fxshard._torch_compat.dtensor.packed import PackedShard, keep_packed
from fxshard.layout.layouts import Layout
from fxshard.runtime.groups.distribute import distribute
from fxshard.runtime.simulate.shards import scatter
from tests.distributed.scenarios import run_scenarios
from tests.packed_models import made

pytestmark = pytest.mark.distributed

CASES = {
    "split": "S(0:8+8+8)",
    "view": "S(0:8+8+8)",
    "fewer pairs, slices": "S(0:8+4+4)",
    "three heads": "S(0:6+6+6)",
    "odd gate and up": "S(0:5+5)",
}


def pinned(name: str, model: nn.Module) -> dict[str, str]:
    return {n: CASES[name] for n, _ in model.named_parameters() if n.startswith("packed")}


def train(model: nn.Module, x: torch.Tensor, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def alike(have: Any, want: Any) -> bool:
    """Whether two state dicts hold the same values."""
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in have.items()}
    return whole.keys() == want.keys() and all(torch.allclose(whole[n], want[n], rtol=1e-9, atol=1e-12) for n in want)


def trained(name: str, compiler: str, steps: int = 3) -> tuple[nn.Module, Any, nn.Module, Any]:
    """The model on two ranks and on one device, with their optimizers, after some steps."""
    model, x = made(name)
    x = x.detach()
    alone = copy.deepcopy(model)
    fxshard.parallelize(model, (x,), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), compiler=compiler, pins=pinned(name, model))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    want = train(alone, x, steps, optimizers[1])
    assert train(model, x, steps, optimizers[0]) == pytest.approx(want, rel=1e-9)
    return model, optimizers[0], alone, optimizers[1]


def trains(name: str) -> None:
    model, _, alone, _ = trained(name, "eager")
    weight = model.get_parameter("packed.weight")
    assert isinstance(weight, DTensor) and str(Layout(weight.placements)) == CASES[name]
    assert alike(model.state_dict(), alone.state_dict())
    assert torch.allclose(weight.grad.full_tensor(), alone.get_parameter("packed.weight").grad)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, alone)]
    assert torch.allclose(norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0], norms[1])


def compiled() -> None:
    model, _, alone, _ = trained("fewer pairs, slices", "inductor", 2)
    assert alike(model.state_dict(), alone.state_dict())


def saved_and_loaded(folder: Path, name: str) -> None:
    """A checkpoint goes from packed parameters to ordinary shards, to one device, and back."""
    model, optimizer, alone, own = trained(name, "eager")
    path = folder / name.replace(" ", "_")
    fxshard.save_checkpoint(path, model, optimizer)
    fxshard.save_checkpoint(f"{path}.safetensors", model, optimizer)
    dcp.save(dict(model.state_dict()), checkpoint_id=f"{path}_dcp")
    fxshard.save_checkpoint(f"{path}_own_dcp", model, optimizer, format="dcp")
    packed, other = ({n: torch.zeros_like(t) for n, t in m.state_dict().items()} for m in (model, alone))
    for state in (packed, other):
        dcp.load(state, checkpoint_id=f"{path}_dcp")
        assert alike(state, alone.state_dict())
    other, x = made(name)
    plain = {n: "S(0)" for n in pinned(name, other)}
    fxshard.parallelize(other, (x.detach(),), init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), compiler="eager", pins=plain)
    for source in (path, f"{path}.safetensors", f"{path}_own_dcp"):
        second = torch.optim.Adam(other.parameters(), lr=0.01)
        fxshard.load_checkpoint(source, other, second)
        assert alike(other.state_dict(), alone.state_dict())
        assert train(other, x.detach(), 1, second) == pytest.approx(train(copy.deepcopy(alone), x.detach(), 1, own), rel=1e-9)
        with torch.no_grad():
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.zero_()
        fxshard.load_checkpoint(source, model, optimizer)
        assert alike(model.state_dict(), alone.state_dict())


def dtensors() -> None:
    """torch's own functions on a packed placement, and fxshard's distribution from one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    keep_packed()
    for size, parts in ((16, (8, 4, 4)), (9, (3, 3, 3)), (18, (14, 4)), (8, (4, 4))):
        whole, packed = torch.arange(size * 3.0).reshape(size, 3), PackedShard(0, parts)
        laid = distribute_tensor(whole, mesh, [packed])
        assert laid.placements == (packed,)
        layout = Layout((packed,))
        assert torch.equal(laid.to_local(), scatter(whole, layout, fxshard.Mesh({"tp": 2}), (dist.get_rank(),)))
        assert torch.equal(laid.full_tensor(), whole)
        for other in (Replicate(), Shard(0), Shard(1)):
            there = laid.redistribute(placements=[other])
            assert torch.equal(there.full_tensor(), whole)
            assert torch.equal(there.redistribute(placements=[packed]).to_local(), laid.to_local())
        changed = laid.clone()
        changed.mul_(2).add_(laid).clamp_(max=30)
        assert changed.placements == laid.placements
        assert torch.equal(changed.full_tensor(), (3 * whole).clamp(max=30))
        assert torch.equal(laid.t().full_tensor(), whole.t()) and laid.t().placements == (PackedShard(1, parts),)
        assert torch.equal(laid.sum(1).full_tensor(), whole.sum(1)) and torch.equal(laid.sum(0).full_tensor(), whole.sum(0))
        with pytest.raises(Exception, match="merge or split dim 0, which is packed in parts of"):
            laid.view(-1)
        mine = whole if dist.get_rank() == 1 else torch.zeros_like(whole)
        assert torch.equal(distribute(mine, layout, mesh, 1), laid.to_local())


SCENARIOS = {**{f"trains: {n}": functools.partial(trains, n) for n in CASES}, "compiled": compiled, "dtensors": dtensors}
SAVED = ("split", "fewer pairs, slices", "three heads")
NAMES = (*SCENARIOS, *(f"saved: {n}" for n in SAVED))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ranks")
    saving = {f"saved: {n}": functools.partial(saved_and_loaded, folder, n) for n in SAVED}
    return run_scenarios({**SCENARIOS, **saving}, 2, folder)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
