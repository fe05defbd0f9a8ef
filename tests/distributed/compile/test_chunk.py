"""Chunked products and collectives on two real ranks: they issue what the program lists, and gradients are those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.ranks.record import in_order_of_issue, record_collectives
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed

FULL_OVERLAP = Hardware("full overlap", {4: 1e9, 8: 1e9}, 1e12, 0.0, 8, Link(1e8, 0.0), Link(1e8, 0.0), overlap=1.0)
"""Slow links without latency, and full overlap of communication with computation: chunking always pays."""


def _same(compiler: str, rows: str) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24)).double()
    x = torch.randn(15 if rows == "R" else 16, 24, dtype=torch.float64)
    pins = {"1.weight": "S(0)", "3.weight": "S(1)", "0": rows, "3": rows, "4": rows}
    plan = fxshard.plan(alone, (x,), Mesh({"tp": 2}, hardware=FULL_OVERLAP), input_layouts="R", output_layouts="R", pins=pins)
    model = copy.deepcopy(alone)
    fxshard.parallelize(model, (x,), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan, compiler=compiler)
    alone(x).square().sum().backward()
    with record_collectives() as issued:
        out = model(x)
        out.square().sum().backward()
    (program,) = model.forward.programs
    predicted = in_order_of_issue(program, dict.fromkeys(program.mesh.axis_names, "gloo"))
    assert [(c.kind, c.axis, c.shape, c.dtype) for c in issued] == [(c.kind, c.axis, c.shape, c.dtype) for c in predicted]
    chunked = [c for c in program.collectives if sum(set(c.serves) <= set(o.serves) for o in program.collectives) > 1]
    wanted = {"all_reduce"} if rows == "R" else {"all_gather", "reduce_scatter"}
    assert wanted <= {c.kind for c in chunked}
    for name, parameter in model.named_parameters():
        want, have = alone.get_parameter(name).grad, parameter.grad
        assert want is not None and have is not None
        torch.testing.assert_close(have.full_tensor() if isinstance(have, DTensor) else have, want, rtol=1e-12, atol=1e-12)


def eager_all_reduced() -> None:
    _same("eager", "R")


def eager_rows() -> None:
    _same("eager", "S(0)")


def inductor_all_reduced() -> None:
    _same("inductor", "R")


def inductor_rows() -> None:
    _same("inductor", "S(0)")


found, test_two_ranks = two_ranks(eager_all_reduced, eager_rows, inductor_all_reduced, inductor_rows)
