"""flex_attention with functions of its own through the other front doors: torch.compile's backend, and program files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard._torch_compat.flex_attention import flex_attention_of_any_device
from tests.models.flex import both, inputs


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize(("mask", "score"), [("documents", "alibi"), ("causal", None)])
def test_the_backend_of_torch_compile(mask: str, score: str | None, mesh: DeviceMesh) -> None:
    model, dense = both(mask, score)
    compiled = torch.compile(model, backend="fxshard", options={"mesh": mesh, "compiler": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs(8)), dense(*inputs(8)), rtol=1e-9, atol=1e-12)
    with flex_attention_of_any_device():  # torch itself refuses to capture the training of it on the CPU
        out = compiled(*inputs(8))
    out.square().sum().backward()
    dense(*inputs(8)).square().sum().backward()
    wanted = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters() if n in wanted}, wanted, rtol=1e-9, atol=1e-12)


def test_a_program_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, dense = both("prefix", "table")
    fxshard.export(model, inputs(8), mesh).save(tmp_path / "m.pt2")
    bound = fxshard.load(tmp_path / "m.pt2").bind(mesh, compiler="eager")
    torch.testing.assert_close(bound(*inputs(8)), dense(*inputs(8)), rtol=1e-9, atol=1e-12)
