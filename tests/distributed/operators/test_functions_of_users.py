"""``torch.autograd.Function``s of users on two ranks, with sharded weights: three training steps equal those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

import fxshard
from tests.distributed.scenarios import two_ranks
from tests.functions_of_users import CASES, Net

pytestmark = pytest.mark.distributed
PINS = {"lin.weight": "S(0)", "weight": "S(0)"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def made(case: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net(case)
    return model, copy.deepcopy(model), torch.randn(5, 6)


def train(model: nn.Module, reference: nn.Module, x: Tensor, rtol: float = 1e-9) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (model, reference)]
    for _ in range(3):
        outputs = [[y for y in tree_leaves(m(x)) if y.is_floating_point()] for m in (model, reference)]
        for have, want in zip(*outputs, strict=True):
            close(have, want, rtol)
        for found, optimizer in zip(outputs, optimizers, strict=True):
            sum(y.square().sum() for y in found if y.requires_grad).backward()
            optimizer.step()
            optimizer.zero_grad()
    for have, want in zip((*model.parameters(), *model.buffers()), (*reference.parameters(), *reference.buffers()), strict=True):
        close(have, want, rtol)


def close(have: Any, want: Tensor, rtol: float) -> None:
    have = have.full_tensor() if hasattr(have, "full_tensor") else have
    torch.testing.assert_close(have.detach(), want.detach(), rtol=rtol, atol=rtol)


def parallelized() -> None:
    for case in CASES:
        model, reference, x = made(case)
        pins = {name: layout for name, layout in PINS.items() if name == "lin.weight" or case in ("saved", "twice", "again")}
        fxshard.parallelize(model, (x,), mesh(), pins=pins, compiler="eager")
        train(model, reference, x)


def compiled() -> None:
    for case in ("saved", "in_place", "counted"):
        model, reference, x = made(case)
        fxshard.parallelize(model, (x,), mesh(), pins={"lin.weight": "S(0)"})
        train(model, reference, x)


def as_backend() -> None:
    """Only the functions that Dynamo can trace."""
    for case in ("saved", "several", "apart"):
        model, reference, x = made(case)
        train(torch.compile(model, backend="fxshard", options={"mesh": mesh(), "compiler": "eager"}), reference, x)


found, test_two_ranks = two_ranks(parallelized, compiled, as_backend)
