"""Compiled functions of DTensors: inputs in any layout, sizes that change, writes, attributes. As eager DTensor, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.backend.dtensor_cases import S0, S1, Arguments, P, R, both, dtensor, own, results_and_gradients, run, same, whole
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


def product(mesh: DeviceMesh, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """The result is not contiguous."""
    return torch.nn.functional.linear(x.permute(0, 2, 1).contiguous(), y, z).permute(0, 2, 1)


def normed(mesh: DeviceMesh, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.permute(0, 2, 1).contiguous(), (4,), y, z, 1e-5).permute(0, 2, 1)


def by_attributes(mesh: DeviceMesh, x: DTensor) -> Tensor:
    y = x * 2 if x.device_mesh.device_type == "cpu" and x.device_mesh.size(0) == 2 else x
    return y + 1 if y.placements[0].is_shard(0) else y + 2


def shaped(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return DTensor.from_local(x, mesh, R, run_check=False, shape=x.shape, stride=x.stride()).to_local() + 2


def torch_linear(mesh: DeviceMesh, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def pending(*shape: int) -> Arguments:
    return lambda mesh: [DTensor.from_local(whole(*shape) + mesh.get_local_rank(), mesh, P, run_check=False).requires_grad_()]


CASES: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "pointwise": (lambda mesh, x: x * x + 2, dtensor(Shard(0), 8, 4)),
    "one_row": (lambda mesh, x: x * x + 2, dtensor(Shard(0), 1, 4)),
    "one_column": (lambda mesh, x, y: (x * 2, x @ y), both(dtensor(Shard(1), 4, 1), dtensor(Shard(0), 1, 3))),
    "one_row_of_a_weight": (torch_linear, both(dtensor(Replicate(), 4, 6), dtensor(Shard(0), 1, 6), dtensor(Shard(0), 1, add=1))),
    "placed_in_one_column": (lambda mesh, x: x.redistribute(mesh, S1) + 1, dtensor(Replicate(), 4, 1)),
    "no_rows": (lambda mesh, x, y: x @ y, both(dtensor(Shard(1), 0, 1), dtensor(Shard(0), 1, 3))),
    "returned_pending": (lambda mesh, x, y: (x @ y, x + 1), both(dtensor(Shard(1), 4, 6), dtensor(Shard(0), 6, 3))),
    "returned_unchanged": (lambda mesh, x: x, dtensor(Shard(0), 2, 4)),
    "not_contiguous": (product, both(dtensor(Shard(1), 4, 16, 4), dtensor(Shard(1), 4, 16, add=1), dtensor(Replicate(), 4))),
    "gradient_in_another_layout": (normed, both(dtensor(Shard(1), 4, 4, 4), dtensor(Replicate(), 4, add=1), dtensor(Replicate(), 4))),
    "attributes": (by_attributes, dtensor(Shard(0), 4, 4)),
    "pending_sum_to_uneven_shards": (lambda mesh, x: x.redistribute(mesh, [Shard(1)]), pending(4, 7, 3)),
    "pending_sum": (lambda mesh, x: x + x, pending(4, 4)),
    "pending_sum_and_product": (lambda mesh, x, y: (x + x) @ y, both(pending(4, 4), dtensor(Replicate(), 4, 4))),
    "several_results": (lambda mesh, x: (x.sum(), x.mean(0), *x.chunk(2, 1)), dtensor(Shard(0), 4, 6)),
    "written": (lambda mesh, x: x.mul_(2) + 1, lambda mesh: [dtensor(Shard(0), 4, 6)(mesh)[0].detach()]),
    "joined": (lambda mesh, x, y: torch.cat([x, y]), both(dtensor(Replicate(), 4, 6), dtensor(Replicate(), 2, 6))),
    "any": (lambda mesh, x: ((x > 0.9).any(0), (x > 2).any(), (x > 0).any(1)), dtensor(Shard(0), 4, 6)),
    "argmax": (lambda mesh, x: (x.argmax(0), x.argmin(), x.argmax(1), x * x.argmin(0, keepdim=True)), dtensor(Shard(0), 4, 6)),
    "argmax_of_uneven": (lambda mesh, x: (x.argmax(0), x.argmin(1)), dtensor(Shard(0), 5, 6)),
    "sliced": (lambda mesh, x: x[:, 1:3] * 2, dtensor(Shard(0), 4, 6)),
}
DYNAMIC: dict[str, tuple[Callable[..., Any], Callable[[int], Arguments]]] = {
    "local_row_of_whole": (lambda mesh, x: (x * x).redistribute(mesh, R).to_local()[0], lambda n: dtensor(Shard(0), n, 4)),
    "from_local_whole": (shaped, lambda n: lambda mesh: [whole(n, 6).requires_grad_()]),
    "from_local_rows": (lambda mesh, x: (DTensor.from_local(x, mesh, S0) * 2).to_local() + 2, lambda n: own(n, 6)),
    "plain": (lambda mesh, x: torch.relu(x.redistribute(mesh, [Shard(1)])) + 1, lambda n: dtensor(Replicate(), n, 6)),
}


def run_case(name: str) -> None:
    same(*CASES[name])


def made_views(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    return y, y[:, 1:3], y.transpose(0, 1), x[:, 0]


def written_later(*placements: Any) -> None:
    """Results that are views of a result or of an argument share its memory, as in eager execution: all of them see later writes."""
    mesh = DeviceMesh("cpu", [0, 1])
    results = []
    for call in (made_views, torch.compile(made_views, backend="fxshard", fullgraph=True, options={"compiler": "eager", "timeout": 60.0})):
        x = dtensor(*placements, 4, 6)(mesh)[0].detach()
        y, columns, turned, first = call(mesh, x)
        columns.mul_(5)
        turned.add_(1)
        first.sub_(3)
        results.append([x, y, columns, turned, first])
    for have, want in zip(*reversed(results), strict=True):
        assert have.placements == want.placements
        torch.testing.assert_close(have.full_tensor(), want.full_tensor(), rtol=1e-9, atol=1e-9)


def expanded() -> None:
    """Gradients whose elements are one number can be added to and written in place, as in eager execution."""
    mesh = DeviceMesh("cpu", [0, 1])
    for function in (lambda x: x.sum(), lambda x: x.sum(0), lambda x: (x.sum(1), x.sum(0))):
        results = []
        for call in (function, torch.compile(function, backend="fxshard", options={"compiler": "eager", "timeout": 60.0})):
            (x,) = dtensor(Shard(0), 4, 6)(mesh)
            for _ in range(2):
                results_and_gradients(call(x), [x])
            x.grad.mul_(3)
            results.append(x.grad)
        torch.testing.assert_close(results[1].full_tensor(), results[0].full_tensor(), rtol=1e-9, atol=1e-9)


def flattened() -> None:
    """Where eager DTensor leaves a strided shard, a result is a shard of the same whole values, whose parts take no more memory."""
    mesh = DeviceMesh("cpu", [0, 1])
    options = {"compiler": "eager", "timeout": 60.0}
    for function, placement, shape in (
        (lambda x: x.transpose(0, 1).reshape(-1), Shard(0), (4, 6)),
        (lambda x: x.flatten(0, 1).tanh(), Shard(1), (4, 6, 8)),
        (lambda x: (x.redistribute(mesh, [Shard(1)]) * 2).flatten(0, 1), Shard(0), (4, 6, 8)),
    ):
        (x,) = dtensor(placement, *shape)(mesh)
        want, found = function(x), torch.compile(function, backend="fxshard", fullgraph=True, options=options)(x)
        assert [type(p).__name__ for p in want.placements] == ["_StridedShard"]
        assert found.placements == (Shard(0),) and found.to_local().numel() == want.numel() // 2
        torch.testing.assert_close(found.full_tensor(), want.full_tensor(), rtol=1e-9, atol=1e-9)


def run_dynamic(name: str) -> None:
    """Three sizes, dynamic from the start."""
    mesh = DeviceMesh("cpu", [0, 1])
    function, sized = DYNAMIC[name]
    call = lambda *args: function(mesh, *args)  # noqa: E731
    compiled = torch.compile(call, backend="fxshard", fullgraph=True, dynamic=True, options={"compiler": "eager", "timeout": 60.0})
    for size in (4, 6, 10):
        have, want = run(compiled, sized(size)(mesh)), run(call, sized(size)(mesh))
        for x, y in zip(have, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


found, test_two_ranks = cases_on_ranks(
    2,
    {name: partial(run_case, name) for name in CASES}
    | {name: partial(run_dynamic, name) for name in DYNAMIC}
    | {"expanded": expanded, "flattened": flattened}
    | {f"written_later_{name}": partial(written_later, one) for name, one in (("rows", Shard(0)), ("whole", Replicate()))},
)
