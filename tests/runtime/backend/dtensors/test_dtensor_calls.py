"""Calls of DTensor's API in compiled functions, on a mesh of one rank: what is refused, and with which line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fxshard.errors import FxshardError, PlanError, TraceError

S0, R, P = [Shard(0)], [Replicate()], [Partial()]


pytestmark = pytest.mark.usefixtures("mesh")


def refused(kind: type[FxshardError], function: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    compiled = torch.compile(function, backend="fxshard", options={"compiler": "eager", **options})
    with pytest.raises(kind) as caught:
        compiled(*args)
    return str(caught.value)


def selective(function: Callable[..., Any], d: Tensor) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor])
    return checkpoint(function, d, use_reentrant=False, context_fn=contexts)


def sharded(mesh: DeviceMesh, *shape: int) -> DTensor:
    return DTensor.from_local(torch.ones(shape, dtype=torch.float64), mesh, S0, run_check=False)


def test_calls_that_a_plan_cannot_express(mesh: DeviceMesh) -> None:
    x, d = torch.ones(2, 4), sharded(mesh, 2, 4)
    cases: list[tuple[str, Callable[..., Any], Tensor]] = [
        ("forward_dtype changes a dtype", lambda d: d.redistribute(placements=R, forward_dtype=torch.bfloat16), d),
        ("grad_placements is R", lambda d: (d * 2).to_local(grad_placements=R) * 2, sharded(mesh, 2, 4).requires_grad_()),
        ("shards of different sizes", lambda x: DTensor.from_local(x, mesh, S0, shape=torch.Size((3, 4)), stride=(4, 1)) * 2, x),
        ("the value is pending as P(avg)", lambda d: d.mean(0).to_local() * 2, d),
        ("the value is pending as P(max)", lambda d: d.amax(0)._local_tensor * 2, d),
        ("the value is pending as P(min)", lambda d: d.amin(0).to_local() * 2, sharded(mesh, 2, 4).requires_grad_()),
        ("the value is pending as P(product)", lambda d: (d > 0).all(0).to_local(), d),
        ("a policy for selective checkpointing", lambda d: selective(lambda d: d.to_local() * 2, d), d),
    ]
    for said, function, arg in cases:
        text = refused(TraceError, function, arg)
        assert said in text and "test_dtensor_calls.py" in text, text


def test_uneven_shards_cannot_be_computed_on(mesh: DeviceMesh) -> None:
    d = DTensor.from_local(torch.ones(2, 4), mesh, S0, run_check=False, shape=torch.Size((3, 4)), stride=(4, 1))
    text = refused(TraceError, lambda d: d.to_local() + 1, d)
    assert "the shard of 3 elements in dim 0, which are not cut evenly by tp=2" in text and "test_dtensor_calls.py" in text


def test_writes_that_would_be_lost(mesh: DeviceMesh) -> None:
    """A write to the shard of a DTensor that is used afterwards changes the DTensor in eager execution."""

    def lost(d: Tensor) -> tuple[Tensor, Tensor]:
        doubled = d * 2
        local = doubled.to_local()
        local.add_(1)
        return local * 2, doubled

    text = refused(TraceError, lost, sharded(mesh, 2, 4))
    assert "changed in place whose memory a DTensor shares" in text and "test_dtensor_calls.py" in text
    pending = DTensor.from_local(torch.ones(2, 4), mesh, P, run_check=False)
    text = refused(TraceError, lambda d: d.mul_(2) + 1, pending)
    assert "an argument that is a pending sum" in text and "test_dtensor_calls.py" in text and "return the new value" in text


def test_a_local_map_of_dtensors_made_in_the_graph_needs_a_mesh(mesh: DeviceMesh) -> None:
    region = local_map(torch.tanh, out_placements=S0, in_placements=(S0,), redistribute_inputs=True)
    text = refused(TraceError, lambda x: region(DTensor.from_local(x.sin(), mesh, R)).full_tensor(), torch.ones(2, 4))
    assert "local_map region without device_mesh, give it one" in text


def test_two_meshes(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    x = torch.ones(2, 4)
    text = refused(PlanError, lambda x: DTensor.from_local(x, mesh, S0) * 2, x, mesh=other)
    assert "the graph calls DTensor's functions for DeviceMesh((tp=2)" in text and "leave the option mesh out" in text
    text = refused(PlanError, lambda x: (DTensor.from_local(x, mesh, S0) * 2, DTensor.from_local(x, other, P) * 2), x)
    assert "for two meshes" in text
