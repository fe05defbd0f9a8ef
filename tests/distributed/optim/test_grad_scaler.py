"""torch.amp.GradScaler on sharded modules: an overflow in any shard makes all ranks skip the step, as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.calls.inputs import as_dtensor
from fxshard.runtime.optim.grad_scaler import agree_on_overflows
from fxshard.runtime.simulate.shards import scatter
from tests.distributed.scenarios import run_scenarios, two_ranks

pytestmark = pytest.mark.distributed
PINS = {"0.weight": "R", "0.bias": "S(0)", "2.weight": "S(1)", "2.bias": "S(0)"}
"""The first gradient is replicated; the last has three rows, which two ranks do not divide."""
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "sgd fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam foreach": lambda p: optim.Adam(p, 0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, 0.1, fused=True),
}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(model: nn.Module, reference: nn.Module, rtol: float = 1e-9) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=rtol, atol=rtol)


def overflows() -> None:
    """All steps but the first and last have one infinite entry, in one rank's shard; unscaled gradients are clipped."""
    torch.set_default_dtype(torch.float64)
    model, x = network(), torch.randn(5, 4)
    fxshard.parallelize(model, (x,), mesh(), compiler="eager", pins=PINS)
    for make in OPTIMIZERS.values():
        reference = network()
        model.load_state_dict(reference.state_dict())
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1) for _ in range(2)]
        optimizers = [make(m.parameters()) for m in (model, reference)]
        bad = [(name, rank) for name in ("0.bias", "2.weight", "2.bias") for rank in range(2)]
        for step, where in enumerate([None, *bad, None]):
            for scaler, optimizer, m in zip(scalers, optimizers, (model, reference), strict=True):
                optimizer.zero_grad()
                scaler.scale(m(x).square().sum()).backward()
                spoil(m, where)
                scaler.unscale_(optimizer)
                clip = fxshard.clip_grad_norm_ if m is model else nn.utils.clip_grad_norm_
                clip(m.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert [s.get_scale() for s in scalers] == [2.0 ** (31 - step + 2 * (step == 7))] * 2, step
            same(model, reference)


def spoil(model: nn.Module, where: tuple[str, int] | None) -> None:
    """Makes one entry of the gradient infinite: on the ranks in the shard of rank ``where[1]``, on one device the last."""
    if where is None:
        return
    grad = model.get_parameter(where[0]).grad
    if not isinstance(grad, DTensor):
        grad.flatten()[-1] = torch.inf
    elif dist.get_rank() == where[1]:
        grad.to_local().view(-1)[0] = torch.inf


def half_precision() -> None:
    """Real overflows of float16: the scale falls until there are none. Steps equal those of a float16 copy on one device."""
    torch.set_default_dtype(torch.float32)
    model, reference, x = network(), network(), torch.randn(6, 4)
    mixed = fxshard.MixedPrecision(torch.float16, torch.float32)
    fxshard.parallelize(model, (x,), mesh(), compiler="eager", pins=PINS, mixed_precision=mixed)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in range(2)]
    optimizers = [optim.SGD(m.parameters(), 0.05) for m in (model, reference)]
    for step in range(8):
        outputs = model(x), torch.func.functional_call(reference, {n: p.half() for n, p in reference.named_parameters()}, x.half())
        assert {o.dtype for o in outputs} == {torch.float16}
        for scaler, optimizer, y in zip(scalers, optimizers, outputs, strict=True):
            optimizer.zero_grad()
            scaler.scale(y.square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        same(model, reference, 1e-2)
    assert scalers[0].get_scale() < 2.0**18
    assert any(not torch.equal(p, q) for p, q in zip(reference.parameters(), network().parameters(), strict=True))


def pending_gradients() -> None:
    """A NaN in a gradient that is pending after ``no_sync`` makes all ranks skip the step."""
    torch.set_default_dtype(torch.float64)
    model, batch = network(), fxshard.local_batch(torch.randn(65, 4), mesh(), "tp")
    cut = {"input_layouts": {"args[0]": "S(0)"}, "output_layouts": "S(0)", "objective": "communication"}
    fxshard.parallelize(model, (batch,), mesh(), compiler="eager", pins={"0.weight": "R", "2.bias": "R"}, **cut)
    optimizer, scaler = optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with fxshard.no_sync(model):
        scaler.scale(model(batch).to_local().square().sum()).backward()
    assert any(placement.is_partial() for p in model.parameters() for placement in p.grad.placements)
    before = [whole(p.detach()).clone() for p in model.parameters()]
    if dist.get_rank() == 1:
        model[2].bias.grad.to_local()[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(whole(p.detach()), q) for p, q in zip(model.parameters(), before, strict=True))


def any_axis() -> None:
    """Gradients sharded on different axes, a replicated and a plain one: whichever rank holds the bad entry, all find it in that step."""
    agree_on_overflows()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts = ["RR", "S(0)R", "RS(0)", "S(0)S(0)", None]
    at = tuple(square.get_coordinate() or ())
    for spoiled, rank in [(k, r) for k in (None, 1, 2, 3) for r in range(4)]:
        parameters = []
        for k, text in enumerate(layouts):
            grad = torch.arange(1.0, 6.0)
            if text is not None:
                layout = Layout.parse(text)
                grad = scatter(grad, layout, as_mesh(square), at).clone()
                if (k, rank) == (spoiled, dist.get_rank()):
                    grad[:1] = torch.inf
                grad = as_dtensor(grad, square, layout, (5,))
            parameter = nn.Parameter(torch.zeros_like(grad))
            parameter.grad = grad
            parameters.append(parameter)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), optim.SGD(parameters)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler._maybe_opt_step = lambda *_: None  # type: ignore[method-assign]  # the step itself is not under test
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if spoiled is None else 2.0), (spoiled, rank)
        torch.testing.assert_close(parameters[0].grad.to_local(), torch.arange(1.0, 6.0) / 4)
        torch.testing.assert_close(parameters[4].grad, torch.arange(1.0, 6.0) / 4)


found, test_two_ranks = two_ranks(overflows, half_precision, pending_gradients)


def test_four_ranks(tmp_path: Path) -> None:
    said = run_scenarios({"any_axis": any_axis}, 4, tmp_path, seconds=120)
    assert not said["any_axis"], said["any_axis"]
