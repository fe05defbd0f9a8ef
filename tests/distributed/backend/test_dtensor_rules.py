"""Operators for which DTensor has no rule of its own: with the backend loaded, eager and compiled DTensors give what one device gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed.backend.dtensor_cases import S0, whole
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


def scattered(x: Tensor, y: Tensor) -> Tensor:
    index = torch.ones_like(x, dtype=torch.int64)
    return torch.scatter_reduce(x, 0, index, y, "sum")


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "addbmm": (torch.addbmm, ((4, 6), (2, 4, 3), (2, 3, 6))),
    "attention": (partial(F.scaled_dot_product_attention, is_causal=True), ((2, 4, 8, 8),) * 3),
    "block_diag": (torch.block_diag, ((4, 2), (2, 4))),
    "cdist": (torch.cdist, ((4, 6), (2, 6))),
    "complex": (torch.complex, ((4, 6), (4, 6))),
    "reflection": (lambda x: F.pad(x, (2, 1), mode="reflect"), ((4, 2, 6),)),
    "windows": (lambda x: F.unfold(x, (2, 2)), ((4, 2, 6, 6),)),
    "unfold": (lambda x: x.unfold(1, 3, 2) * 2, ((4, 9),)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 0.5), ((4, 6),)),
    "scatter_reduce": (scattered, ((4, 6), (4, 6))),
    "trilinear": (F.bilinear, ((4, 6), (4, 2), (8, 6, 2))),
}


def run_case(name: str) -> None:
    import fxshard.runtime.backend.backend  # noqa: F401  (torch.compile does this when it looks up the backend)

    mesh = DeviceMesh("cpu", [0, 1])
    function, shapes = CASES[name]
    plain = [(whole(*shape) + i).requires_grad_() for i, shape in enumerate(shapes)]
    compiled = torch.compile(function, backend="fxshard", fullgraph=True, options={"compiler": "eager", "timeout": 60.0})
    want = function(*plain)
    grads = torch.autograd.grad(want.abs().pow(2).sum(), plain)
    for call in (function, compiled):
        args = [distribute_tensor(x.detach(), mesh, S0).requires_grad_() for x in plain]
        have = call(*args)
        assert isinstance(have, DTensor)
        torch.testing.assert_close(have.full_tensor(), want, rtol=1e-9, atol=1e-9)
        if call is compiled:
            for mine, theirs in zip(torch.autograd.grad(have.full_tensor().abs().pow(2).sum(), args), grads, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-9, atol=1e-9)


DECOMPOSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": partial(F.mse_loss, reduction="none"),
    "smooth_l1_loss": partial(F.smooth_l1_loss, reduction="none"),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "chunk": lambda x, y: torch.unsafe_chunk(x, 2, 1)[1] + y[:, :3],
    "squeeze": lambda x, y: torch.squeeze_copy(x[None] * y, 0),
}
"""Operators that DTensor shards by their decomposition, and an operator with a list of results."""


def decomposed() -> None:
    """Loading the backend leaves the placements of operators that DTensor shards by itself."""
    mesh = DeviceMesh("cpu", [0, 1])
    x, y = (distribute_tensor(whole(4, 6) + i, mesh, S0) for i in range(2))
    import fxshard.runtime.backend.backend  # noqa: F401

    for name, function in DECOMPOSED.items():
        have = function(x, y)
        assert isinstance(have, DTensor) and have.placements == tuple(S0), f"{name} has {have.placements}"
        torch.testing.assert_close(have.full_tensor(), function(whole(4, 6), whole(4, 6) + 1), rtol=1e-12, atol=0)


def written() -> None:
    """Operators that write in place, and that DTensor takes, work in a compiled function."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x = x * 1
        x.index_add_(1, torch.zeros_like(y, dtype=torch.int64)[0], y)
        return x.masked_fill_(y > 20, 3.0)

    mesh = DeviceMesh("cpu", [0, 1])
    compiled = torch.compile(function, backend="fxshard", fullgraph=True, options={"compiler": "eager", "timeout": 60.0})
    x, y = (distribute_tensor(whole(4, 6) + i, mesh, S0) for i in range(2))
    torch.testing.assert_close(compiled(x, y).full_tensor(), function(whole(4, 6), whole(4, 6) + 1), rtol=1e-9, atol=1e-9)


SCENARIOS = {name: partial(run_case, name) for name in CASES} | {"decomposed": decomposed, "written": written}


found, test_two_ranks = cases_on_ranks(2, SCENARIOS)


def test_rules_come_with_the_backend_only() -> None:
    code = """
import torch, fxshard
from torch.distributed.tensor import DTensor
from fxshard.strategies.engine.user_rules import all_user_rules
known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
op = torch.ops.aten.addbmm.default
assert op not in known
torch._dynamo.lookup_backend("fxshard")
assert op in known and not all_user_rules()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_eager_writes_that_torch_refuses_stay_refused() -> None:
    """A write to a view of a sharded dim would be lost. Other in-place operators are taken or refused as before."""
    code = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
d = lambda *shape: distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
zeros = lambda *shape: distribute_tensor(torch.zeros(shape, dtype=torch.int64), mesh, [Replicate()])
REFUSED = {
    "fill_.Tensor": lambda x: x.__setitem__(0, 0),
    "addbmm_.default": lambda x: x.addbmm_(d(2, 4, 3), d(2, 3, 6)),
    "renorm_.default": lambda x: x[0:2].renorm_(2, 0, 0.5),
    "scatter_.reduce": lambda x: x.scatter_(1, zeros(4, 6), d(4, 6), reduce="add"),
    "scatter_.value_reduce": lambda x: x.scatter_(1, zeros(4, 6), 2.0, reduce="add"),
    "scatter_reduce_.two": lambda x: x.scatter_reduce_(1, zeros(4, 6), d(4, 6), "sum"),
}
ALIKE = {
    "addmv_": lambda x: x[:, 0].addmv_(d(4, 6), distribute_tensor(torch.ones(6), mesh, [Replicate()])),
    "addr_": lambda x: x.addr_(d(4), d(6)),
    "floor_divide_": lambda x: x.floor_divide_(2),
    "hardswish_": lambda x: torch.nn.functional.hardswish(x, inplace=True),
    "index_add_": lambda x: x.index_add_(1, zeros(2), d(4, 2)),
    "index_copy_": lambda x: x.index_copy_(1, zeros(2), d(4, 2)),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, d(1)[0]),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 0, d(4, 6)),
    "put_": lambda x: x.put_(zeros(4, 6), d(4, 6)),
}

def said(function):
    try:
        function(d(4, 6))
    except RuntimeError as error:  # or a NotImplementedError, which is one
        return str(error).splitlines()[0]

before = {name: said(function) for name, function in (REFUSED | ALIKE).items()}
torch._dynamo.lookup_backend("fxshard")
for name, function in (REFUSED | ALIKE).items():
    assert said(function) == before[name], (name, before[name], said(function))
    assert name in ALIKE or f"Operator aten.{name} does not have a sharding strategy" in before[name], (name, before[name])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
