"""Training loops that users write, on two ranks: adapters, last batches, mixed precision, checkpointing; each against one device."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxshard
from fxshard.runtime.ranks.record import record_collectives
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
CUT = {"input_layouts": {"args[0]": "S(0)"}, "output_layouts": "R", "objective": "communication"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def mine(x: Tensor, device_mesh: DeviceMesh) -> Tensor:
    return fxshard.local_batch(x[: -(-len(x) // 2)] if dist.get_rank() == 0 else x[-(-len(x) // 2) :], device_mesh)


def close(have: Any, want: Tensor, rtol: float = 1e-9) -> None:
    have = have.full_tensor() if hasattr(have, "full_tensor") else have
    assert have.dtype == want.dtype and (have - want).norm() <= rtol * max(float(want.norm()), 1e-6)


class Adapted(nn.Module):
    """A frozen layer plus a low-rank adapter (LoRA)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(columns, rows), nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Adapted(9, 6), Adapted(5, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.gelu(self.one(x))).square().sum()


RETURNED = {"one": "S(0)", "two": "S(0)", "*.base.weight": "S(0)"}


def adapters() -> None:
    """Frozen parameters have no gradient and no reduction, whether frozen at the start or later; unfrozen ones train again."""
    torch.set_default_dtype(torch.float64)
    model, device_mesh, x = Net(), mesh(), torch.randn(65, 6)
    reference = copy.deepcopy(model)
    fxshard.parallelize(model, (mine(x, device_mesh),), device_mesh, compiler="eager", pins=RETURNED, **CUT, without=["bucket"])
    model(mine(x, device_mesh))
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, reference)]
    for frozen in (False, True, True, False):
        for m in (model, reference):
            m.one.requires_grad_(not frozen)
            m.one.base.requires_grad_(False)
        if frozen:
            model(mine(x, device_mesh))  # plans now: later that would be recorded
        with record_collectives() as issued:
            model(mine(x, device_mesh)).to_local().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert sum(c.kind in ("all_reduce", "all_to_all") for c in issued) == len(trained) + 1  # the loss is one more
        reference(x).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
            if q.grad is not None:
                close(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(model.forward.programs) == 2
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p, q)


def last_batches() -> None:
    """Batches of one row and of none after larger ones: a rank without rows still takes part in collectives."""
    torch.set_default_dtype(torch.float64)
    model, device_mesh = Net(), mesh()
    reference = copy.deepcopy(model)
    fxshard.parallelize(
        model, (mine(torch.randn(6, 6), device_mesh),), device_mesh, compiler="eager", pins={"*.base.weight": "S(0)"}, **CUT
    )
    for rows in (6, 1, 0, 6):
        x = torch.randn(rows, 6)
        close(model(mine(x, device_mesh)), reference(x))
        model(mine(x, device_mesh)).to_local().backward()
        reference(x).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if q.grad is not None:
                close(p.grad, q.grad)


def precision(compiler: str) -> None:
    """Float64 master weights, float32 computation: weights are gathered in float32, gradients reduced in float64, also with ``no_sync``."""
    torch.set_default_dtype(torch.float64)
    model, device_mesh, x = Net(), mesh(), torch.randn(65, 6)
    reference = copy.deepcopy(model)
    mixed = fxshard.MixedPrecision(torch.float32, torch.float64)
    pins = RETURNED | {"*.weight": "S(0)"}
    fxshard.parallelize(model, (mine(x, device_mesh),), device_mesh, compiler=compiler, pins=pins, mixed_precision=mixed, **CUT)
    model(mine(x, device_mesh))
    with fxshard.no_sync(model):
        model(mine(x, device_mesh)).to_local().backward()
    with record_collectives() as issued:
        out = model(mine(x, device_mesh))
        out.to_local().backward()
    assert out.dtype == torch.float32
    assert {c.dtype for c in issued if c.kind == "all_gather"} == {"torch.float32"}
    assert [c.dtype for c in issued if c.kind == "reduce_scatter"] == ["torch.float64"] * 4
    reference(x).mul(2).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype == torch.float64
        if q.grad is not None:
            close(p.grad, q.grad, 1e-5)  # sums of 65 rows in float32, against float64
    torch.optim.AdamW(model.parameters()).step()


def precision_eager() -> None:
    precision("eager")


def precision_compiled() -> None:
    precision("inductor")


def keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    def __init__(self, how: dict[str, Any] | None, drop: float) -> None:
        super().__init__()
        self.up, self.down, self.how, self.drop = nn.Linear(6, 9), nn.Linear(9, 6), how, drop

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x)).tanh()), self.drop).sin()

    def forward(self, x: Tensor) -> Tensor:
        return (self.block(x) if self.how is None else checkpoint(self.block, x, **self.how)).square().sum()


def checkpoints() -> None:
    """Each kind of checkpointing gives the numbers and masks of the same model without it, which without dropout are those of one device;
    with parallelize and with the backend.
    """
    torch.set_default_dtype(torch.float64)
    torch._dynamo.config.recompile_limit = 64
    device_mesh, x = mesh(), torch.randn(6, 6)
    selective = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_matmuls)}
    for drop in (0.0, 0.4):
        plain = Checkpointed(None, drop)
        kinds = {"whole": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}, "selective": selective}
        for name, how in {"plain": None, **(kinds if drop else {})}.items():
            for backend in (False, True):
                model = Checkpointed(how, drop)
                model.load_state_dict(plain.state_dict())
                y = x.clone().requires_grad_()
                torch.manual_seed(3)
                if backend:
                    torch.compile(model, backend="fxshard", options={"mesh": device_mesh, "compiler": "eager"})(y).backward()
                else:
                    fxshard.parallelize(model, (y,), device_mesh, compiler="eager")
                    torch.manual_seed(3)
                    model(y).backward()
                if drop == 0:
                    plain.zero_grad()
                    plain(x).backward()
                    expected = [p.grad for p in plain.parameters()]
                elif name == "plain" and not backend:
                    expected = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
                for p, want in zip(model.parameters(), expected, strict=True):
                    close(p.grad, want)


found, test_two_ranks = two_ranks(adapters, last_batches, precision_eager, precision_compiled, checkpoints)
