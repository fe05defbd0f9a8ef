"""A model with the user's own Triton kernels on two ranks, with a sharded batch: it trains as on one device, eager and with Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.distributed.scenarios import two_ranks
from tests.user_kernels import KERNEL, Net

pytestmark = pytest.mark.distributed


def train(compiler: str) -> None:
    triton_kernel_wrap.get_mutated_tensors = lambda *_: ["out"]  # type: ignore[assignment]  # in a process of its own
    torch.set_default_dtype(torch.float64)
    model, x = Net(), torch.randn(5, 6)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch = fxshard.local_batch(x[:3] if mesh.get_rank() == 0 else x[3:], mesh)
    fxshard.parallelize(model, (batch,), mesh, pins={"lin.weight": "S(0)", "weight": "S(0)"}, output_layouts="S(0)", compiler=compiler)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, reference)]
    for _ in range(3):
        KERNEL.seen.clear()
        out = model(batch)
        (out.to_local() ** 2).sum().backward()
        assert KERNEL.seen == [((5, 4), (3, 1, 1))] * 6
        reference(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-12)


def eager() -> None:
    train("eager")


def compiled() -> None:
    train("inductor")


def as_backend() -> None:
    triton_kernel_wrap.get_mutated_tensors = lambda *_: ["out"]  # type: ignore[assignment]  # a stand-in, as above
    torch.set_default_dtype(torch.float64)
    model, x = Net(), torch.randn(5, 6)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    run = torch.compile(model, backend="fxshard", options={"mesh": mesh, "compiler": "eager"})
    for m in (run, reference):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


found, test_two_ranks = two_ranks(eager, compiled, as_backend)
