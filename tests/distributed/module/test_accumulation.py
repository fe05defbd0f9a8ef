"""Gradient accumulation with one reduction a step: ``fxshard.no_sync`` against one device, on two ranks."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import OptionError
from fxshard.layout.layouts import Layout
from fxshard.runtime.groups.reduce_scatter import issued_kind
from fxshard.runtime.ranks.record import record_collectives
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
SUMS = ("all_reduce", "reduce_scatter")
ISSUED = tuple(issued_kind("gloo", kind) for kind in SUMS)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def mine(x: Tensor, device_mesh: DeviceMesh) -> DTensor:
    return fxshard.local_batch(x.chunk(2)[dist.get_rank()], device_mesh)


def same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        for have, want in ((p, q), (p.grad, q.grad)):
            if want is None:
                assert have is None
                continue
            assert have.placements == p.placements, name
            error = (have.full_tensor() - want).norm()
            assert error <= 1e-9 * max(float(want.norm()), 1e-6), (name, float(error))


class Net(nn.Module):
    """An embedding, a norm, tied weights, a frozen weight, one that is not used; sizes that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(11, 6), nn.Linear(6, 9), nn.LayerNorm(9)
        self.down, self.frozen = nn.Linear(9, 6, bias=False), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.gelu(self.up(self.table(x))))
        return F.cross_entropy(self.head(self.frozen(self.down(y))), x)


RETURNED = {name: "S(0)" for name in ("table", "up", "norm", "down", "frozen", "head")}
"""Outputs of modules are sharded by rows: with data parallelism each gradient is a sum over ranks."""


def trained(pins: dict[str, str], compiler: str, count: int = 5) -> None:
    """Two steps of four micro-batches give the numbers of one device; ``count`` gradients are reduced, once per step."""
    torch.set_default_dtype(torch.float64)
    model, device_mesh = Net(), mesh()
    reference = copy.deepcopy(model)
    steps = [[torch.randint(0, 11, (65,)) for _ in range(4)] for _ in range(2)]
    pinned = {"pins": {**RETURNED, **pins}, "input_layouts": {"args[0]": "S(0)"}, "output_layouts": "R", "objective": "communication"}
    fxshard.parallelize(model, (mine(steps[0][0], device_mesh),), device_mesh, compiler=compiler, without=["bucket"], **pinned)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    (program,) = model.forward.programs
    gathers = Counter(c.kind for c in program.collectives if c.kind not in SUMS)
    assert not {*gathers} & {*ISSUED}
    all_sums = sum(c.kind in SUMS for c in program.collectives)
    with fxshard.no_sync(model):  # makes its program now: later its tracing would be recorded
        model(mine(steps[0][0], device_mesh)).to_local().backward()
    optimizers[0].zero_grad()
    for batches in steps:
        with record_collectives() as local, fxshard.no_sync(model):
            for x in batches[:-1]:
                model(mine(x, device_mesh)).to_local().backward()
        read = [p for p in model.parameters() if p.grad is not None]
        layouts = {n: str(Layout(p.grad.placements)) for n, p in model.named_parameters() if p.grad is not None}
        assert list(layouts.values()) == ["P"] * count, layouts
        assert all(p.grad.to_local().shape == p.shape for p in read)
        with record_collectives() as last:
            model(mine(batches[-1], device_mesh)).to_local().backward()
        kinds = Counter(c.kind for c in local)
        assert sum(kinds[k] for k in ISSUED) == 3 * (all_sums - count), kinds
        assert {k: n for k, n in kinds.items() if k not in ISSUED} == {k: 3 * n for k, n in gathers.items()}, (kinds, gathers)
        assert sum(c.kind in (*SUMS, *ISSUED) for c in last) == all_sums, "DTensor issues the reductions of pending gradients"
        for x in batches:
            reference(x).backward()
        same(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(model, reference)


def replicated() -> None:
    trained({"*.weight": "R", "*.bias": "R"}, "eager", 6)


def sharded() -> None:
    trained({"*.weight": "S(0)", "*.bias": "S(0)"}, "eager", 6)


def compiled() -> None:
    trained({"*.weight": "S(0)", "*.bias": "R"}, "inductor", 6)


def any_order() -> None:
    """Forward and backward on different sides of ``no_sync``; a norm and an optimizer step on pending gradients; gradients set to None."""
    torch.set_default_dtype(torch.float64)
    model, device_mesh = Net(), mesh()
    reference = copy.deepcopy(model)
    x, y = torch.randint(0, 11, (65,)), torch.randint(0, 11, (65,))
    pins = {**RETURNED, "*.weight": "S(0)", "*.bias": "R"}
    options = {"input_layouts": {"args[0]": "S(0)"}, "output_layouts": "R", "objective": "communication"}
    fxshard.parallelize(model, (mine(x, device_mesh),), device_mesh, compiler="eager", pins=pins, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    early = model(mine(x, device_mesh)).to_local()
    with fxshard.no_sync(model):
        late = model(mine(y, device_mesh)).to_local()
        model(mine(x, device_mesh)).to_local().backward()
        early.backward()  # these gradients are reduced, although earlier ones are pending
    late.backward()
    reference(torch.cat([x, x, y])).mul(3).backward()
    same(model, reference)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step == 0)
        with fxshard.no_sync(model), fxshard.no_sync(nn.Sequential(model)):
            model(mine(y, device_mesh)).to_local().backward()
        reference(y).backward()
        assert any(p.grad.placements != p.placements for p in model.parameters() if p.grad is not None)
        norms = [f(m.parameters(), 0.01) for f, m in ((fxshard.clip_grad_norm_, model), (nn.utils.clip_grad_norm_, reference))]
        assert abs(norms[0] - norms[1]) <= 1e-9 * norms[1]
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.full_tensor() - q).norm() <= 1e-9 * q.norm()
    for wrong in (reference, 3):
        with pytest.raises(OptionError, match="no_sync was given"), fxshard.no_sync(wrong):
            pass


def in_the_first_step() -> None:
    """The first call after ``parallelize_module`` may be within ``no_sync``, also for a part of a model that is given; the first call
    outside reduces."""
    torch.set_default_dtype(torch.float64)
    batches = [torch.randint(0, 11, (8,)) for _ in range(3)]
    for plan in ({"dp": "fsdp"}, {"dp": "ddp"}):
        model = Net()
        reference = copy.deepcopy(model)
        fxshard.parallelize_module(model, mesh(), plan, compiler="eager")
        with fxshard.no_sync(nn.Sequential(model)):
            with fxshard.no_sync(model):
                model(batches[0]).square().sum().backward()
            model(batches[1]).square().sum().backward()
            assert any(p.grad.placements != p.placements for p in model.parameters() if p.grad is not None)
        model(batches[2]).square().sum().backward()
        for x in batches:
            reference(x).square().sum().backward()
        same(model, reference)
        model.zero_grad()
        model(batches[0]).square().sum().backward()
        assert all(p.grad.placements == p.placements for p in model.parameters() if p.grad is not None)


class Recurrent(nn.Module):
    """Both biases of an LSTM have the same gradient, which one operator computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0])


def equal_gradients() -> None:
    """Gradients that are added up without ``no_sync``, then scaled in place."""
    torch.set_default_dtype(torch.float64)
    for word in ("fsdp", "ddp"):
        model, x = Recurrent(), torch.randn(2, 3, 4)
        reference = copy.deepcopy(model)
        fxshard.parallelize(model, (x,), mesh(), parallel={"dp": word}, compiler="eager")
        for m in (model, reference):
            for _ in range(2):
                m(x).square().sum().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        same(model, reference)


class Pooled(nn.Module):
    """The gradient of the table is a row, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unread = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table).sum(0)


def expanded_gradients() -> None:
    """As ``equal_gradients``, for gradients whose elements share memory."""
    torch.set_default_dtype(torch.float64)
    for parallelize in (
        lambda model, x: fxshard.parallelize(model, (x,), mesh(), compiler="eager"),
        lambda model, x: fxshard.parallelize_module(model, mesh(), "auto", compiler="eager"),
    ):
        torch.manual_seed(0)
        model, x = Pooled(), torch.randn(4, 6)
        reference = copy.deepcopy(model)
        parallelize(model, x)
        for m in (model, reference):
            for _ in range(2):
                m(x).square().sum().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        same(model, reference)


found, test_two_ranks = two_ranks(replicated, sharded, compiled, any_order, in_the_first_step, equal_gradients, expanded_gradients)
