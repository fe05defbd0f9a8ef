"""Mixed precision: the dtype of each collective, and results compared with one device that makes the same casts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fxshard
from fxshard.errors import OptionError
from fxshard.mesh.mesh import Mesh

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16


class Net(nn.Module):
    """Tied weights, read by an embedding and a matmul; the forward asks for the dtype of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(11, 6), nn.Linear(6, 9), nn.LayerNorm(9)
        self.down, self.head = nn.Linear(9, 6, bias=False), nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        one = torch.ones(6, dtype=self.up.weight.dtype)  # in another dtype it would change the dtype of all that follows
        y = self.norm(F.gelu(self.up(self.table(x) * scale * one)))
        return F.cross_entropy(self.head(self.down(y)), x)


PINS = {name: "S(0)" for name in ("table", "up", "norm", "down", "head", "*.weight", "*.bias")}


def one_device(model: Net, x: Tensor, scale: Tensor, to: torch.dtype) -> Tensor:
    cast = {name: p.to(to) for name, p in model.named_parameters()}
    loss: Tensor = functional_call(model, cast, (x, scale.to(to)), tie_weights=True)
    loss.backward()
    return loss


DTYPES = [(f64, f32, f64), (f64, f32, f32), (f64, f32, None), (f32, f32, f64), (f32, bf16, f32), (f32, bf16, None), (f64, bf16, f32)]


@pytest.mark.parametrize(("master", "compute", "reduce"), DTYPES)
def test_dtypes_and_results(master: torch.dtype, compute: torch.dtype, reduce: torch.dtype | None) -> None:
    """Weights are gathered in ``compute``, gradients are reduced in ``reduce``, and parameters and gradients stay in ``master``.

    One device with the same casts rounds too. So both are compared with float64: the program's error may be 1.25 times the device's.
    """
    torch.manual_seed(0)
    precision = fxshard.MixedPrecision(compute, reduce)
    model, x, scale = Net().to(master), torch.randint(0, 11, (65,)), torch.rand(6, dtype=master)
    options = {"input_layouts": ["S(0)", "R"], "output_layouts": "R", "objective": "communication"}
    plan = fxshard.plan(model, (x, scale), Mesh({"dp": 2}), pins=PINS, mixed_precision=precision, **options)
    program = fxshard.lower(model, (x, scale), plan, mixed_precision=precision, without=["bucket"])
    found = {kind: [(c.dtype, c.bytes) for c in program.collectives if c.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    assert len(found["all_gather"]) == len(found["reduce_scatter"]) == 6
    assert {dtype for dtype, _ in found["all_gather"]} == {str(compute)}
    assert {dtype for dtype, _ in found["reduce_scatter"]} == {str(reduce or compute)}
    rows = {name: -(-p.shape[0] // 2) * p[0].numel() for name, p in model.named_parameters()}  # of the larger shard
    assert sum(size for _, size in found["all_gather"]) == sum(rows.values()) * compute.itemsize
    result = fxshard.simulate(program, (x, scale), weights=dict(model.named_parameters()))
    exact = copy.deepcopy(model).double()
    losses = [one_device(m, x, scale, dtype).item() for m, dtype in ((model, compute), (exact, f64))]
    assert result.outputs.dtype == compute and abs(float(result.outputs) - losses[0]) <= 2 * torch.finfo(compute).eps * losses[0]
    ours = theirs = 0.0
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert result.grads[name].dtype == p.grad.dtype == master
        ours += float((result.grads[name] - q.grad).square().sum())
        theirs += float((p.grad - q.grad).square().sum())
    assert 0 < ours**0.5 <= 1.25 * theirs**0.5


def test_simulating_a_model() -> None:
    """It equals the program that is lowered separately, with a given plan and with a new one."""
    model, args, mesh = Net(), (torch.randint(0, 11, (65,)), torch.rand(6)), Mesh({"dp": 2})
    precision = fxshard.MixedPrecision(bf16, f32)
    plan = fxshard.plan(model, args, mesh, mixed_precision=precision)
    program = fxshard.lower(model, args, plan, mixed_precision=precision)
    want = fxshard.simulate(program, args, weights=dict(model.named_parameters()))
    assert want.outputs.dtype == bf16
    for given in ({"plan": plan}, {"mesh": mesh}):
        have = fxshard.simulate(model, args, **given, mixed_precision=precision)
        torch.testing.assert_close((have.outputs, have.grads), (want.outputs, want.grads), rtol=0, atol=0)
    with pytest.raises(OptionError, match="mixed_precision would be ignored"):
        fxshard.simulate(program, args, mixed_precision=precision)
    with pytest.raises(OptionError, match="mixed_precision is a dtype"):
        fxshard.simulate(model, args, plan, mixed_precision=bf16)


def test_the_same_plan_does_not_serve_another_precision() -> None:
    """Not even one that differs only in the dtype of reductions."""
    model, x, scale = Net(), torch.randint(0, 11, (65,)), torch.rand(6)
    plan = fxshard.plan(model, (x, scale), Mesh({"dp": 2}), mixed_precision=fxshard.MixedPrecision(bf16))
    for other in (None, fxshard.MixedPrecision(bf16, f32), fxshard.MixedPrecision(torch.float16)):
        with pytest.raises(fxshard.errors.PlanError, match="for another graph"):
            fxshard.lower(model, (x, scale), plan, mixed_precision=other)


def test_invalid_dtypes_are_refused() -> None:
    for dtype in (torch.int32, torch.float8_e4m3fn, "bfloat16", None):
        with pytest.raises(OptionError, match="param_dtype is"):
            fxshard.MixedPrecision(dtype)
    with pytest.raises(OptionError, match=r"reduce_dtype is torch\.bool"):
        fxshard.MixedPrecision(bf16, torch.bool)
    with pytest.raises(OptionError, match="mixed_precision is a dtype"):
        fxshard.plan(nn.Linear(2, 2), (torch.ones(2, 2),), Mesh({"dp": 2}), mixed_precision=bf16)
