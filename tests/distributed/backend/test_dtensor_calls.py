"""torch.compile(backend="fxshard") of functions that call DTensor's API, on two gloo ranks: as eager DTensor, in float64, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

from tests.distributed.backend.dtensor_cases import S0, S1, Arguments, P, R, both, dtensor, own, same, whole
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


def attention(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    local = (x @ w).redistribute(placements=S1).to_local()
    heads = local.view(local.shape[0], -1, 2).transpose(0, 1)
    mixed = torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
    return DTensor.from_local(mixed.transpose(0, 1).flatten(1), mesh, S1)


def region(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    rows = local_map(lambda a, b: torch.relu(a @ b), out_placements=S0, in_placements=(S0, R), redistribute_inputs=True)
    return rows(x, w) * 2


def written(mesh: DeviceMesh, x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return DTensor.from_local(x * 2, mesh, S0)


def written_later(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, Tensor]:
    """Results that are changed in place after they were computed."""
    doubled, local = x * 2, x.to_local() * 3
    doubled.mul_(2)
    local.add_(1)
    return doubled, local


def in_pieces(mesh: DeviceMesh, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Operators with several results, and numbers read from local shapes."""
    local = torch.cat([x.to_local(), y.to_local()], 1)
    first, second = local.chunk(2, 1)
    return first * torch.arange(local.shape[0])[:, None], second, second


CASES: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "redistribute_is_the_result": (lambda mesh, x: (x * 2).redistribute(placements=S1), dtensor(Shard(0), 4, 6)),
    "redistribute_inside": (lambda mesh, x: torch.tanh((x * x).redistribute(placements=R)) + 1, dtensor(Shard(0), 4, 6)),
    "full_tensor_is_the_result": (lambda mesh, x: (x * 2).full_tensor(), dtensor(Shard(0), 4, 6)),
    "full_tensor_inside": (lambda mesh, x: torch.relu((x * 2).full_tensor()) + 1, dtensor(Shard(0), 4, 6)),
    "shard_is_the_result": (lambda mesh, x: (x * 2).to_local(), dtensor(Shard(0), 4, 6)),
    "uneven_shard_is_the_result": (lambda mesh, x: (x * 2).to_local(), dtensor(Shard(0), 5, 6)),
    "shard_of_redistributed": (lambda mesh, x: x.redistribute(placements=S1).to_local(), dtensor(Shard(0), 4, 6)),
    "computed_on_the_shard": (lambda mesh, x: torch.tanh((x * 2).to_local()) + 2, dtensor(Shard(0), 4, 6)),
    "attribute_of_the_shard": (lambda mesh, x: ((x * 2)._local_tensor + 2, x * 3), dtensor(Shard(0), 4, 6)),
    "scalar_of_the_shard": (lambda mesh, x: (x * 2).to_local().sum(), dtensor(Shard(0), 4, 6)),
    "term_of_a_sum": (lambda mesh, x: x.sum(0).to_local(grad_placements=P) * 2, dtensor(Shard(0), 4, 6)),
    "region_between_dtensors": (attention, both(dtensor(Replicate(), 4, 6), dtensor(Shard(1), 6, 8, add=1))),
    "local_map": (region, both(dtensor(Shard(0), 4, 6), dtensor(Replicate(), 6, 6, add=1))),
    "from_local_replicated": (lambda mesh, x: DTensor.from_local(x, mesh, R).to_local() + 2, lambda mesh: [whole(4).requires_grad_()]),
    "from_local_sharded": (lambda mesh, x: DTensor.from_local(x, mesh, S0) * 2, own(2, 6)),
    "from_local_computed": (lambda mesh, x: DTensor.from_local(torch.sin(x), mesh, S0).redistribute(placements=S1), own(2, 6)),
    "from_local_term": (lambda mesh, x: DTensor.from_local(x * 2, mesh, P).redistribute(placements=R).to_local() + x, own(2, 6)),
    "from_local_average": (lambda mesh, x: DTensor.from_local(x * 2, mesh, [Partial("avg")]).to_local() * x, own(2, 6)),
    "average_then_local": (lambda mesh, x: x.mean(0).redistribute(placements=R).to_local() * 2, dtensor(Shard(0), 4, 6)),
    "from_local_product": (
        lambda mesh, x, y: (DTensor.from_local(x, mesh, S0) @ DTensor.from_local(y, mesh, S1)).redistribute(placements=R).to_local(),
        both(own(2, 6), own(6, 2)),
    ),
    "from_local_scalar": (lambda mesh, x: DTensor.from_local(x, mesh, P) * 2, own()),
    "checkpointed": (lambda mesh, x: checkpoint(attention, mesh, x, x.T, use_reentrant=False) * 2, dtensor(Replicate(), 4, 6)),
    "grad_placements": (lambda mesh, x: (x * 2).full_tensor(grad_placements=P) + 1, dtensor(Shard(0), 4, 6)),
    "async_op": (lambda mesh, x: x.redistribute(placements=R, async_op=True).to_local() + 1, dtensor(Shard(0), 4, 6)),
    "write_to_the_shard": (lambda mesh, x: (x * 2).to_local().add_(1) * 3, lambda mesh: [distribute_tensor(whole(4, 6), mesh, S0)]),
    "results_written_later": (written_later, dtensor(Shard(0), 4, 6)),
    "in_pieces": (in_pieces, both(dtensor(Shard(0), 4, 6), dtensor(Shard(0), 4, 2))),
    "write_to_own_tensor": (written, lambda mesh: [(whole(2, 6) + mesh.get_local_rank()), whole(2, 6)]),
    "local_beside_dtensors": (lambda mesh, x, y: (x.to_local() + y, x * 2), both(dtensor(Shard(0), 4, 6), own(2, 6))),
}


def run_case(name: str) -> None:
    same(*CASES[name])


found, test_two_ranks = cases_on_ranks(2, {name: partial(run_case, name) for name in CASES})
