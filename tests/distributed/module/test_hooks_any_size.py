"""Backward hooks of submodules with changing sizes, on two ranks, against one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.distributed.logged import logged
from tests.distributed.module.test_hooks import close
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Doubled(nn.Module):
    """The inner module gets twice as many rows as the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(x)
        return self.inner(torch.cat([y, y * 2]))


def called(make: Any, place: str, rows: tuple[int, ...], **options: Any) -> Any:
    """Calls the model at each number of rows: backward hooks of the submodule ``place`` see what they see on one device."""
    torch.manual_seed(0)
    reference = make().double()
    model, seen = copy.deepcopy(reference), ([], [])
    for one, own in zip((model, reference), seen, strict=True):
        part = one.get_submodule(place)
        part.register_full_backward_hook(lambda m, given, out, own=own: own.append((given[0].clone(), out[0].clone())))
        part.register_full_backward_pre_hook(lambda m, out, own=own: own.append(out[0].clone()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = [torch.linspace(-1, 1, 4 * n, dtype=torch.float64).view(n, 4).sin() for n in (4, *rows)]
    fxshard.parallelize(model, (x[0],), mesh, compiler="eager", **options)
    for value in x:
        for one in (model, reference):
            one(value).square().sum().backward()
    assert len(seen[1]) == 2 * len(x)
    close(*seen)
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    return model.forward


def any_rows() -> None:
    """One program serves even numbers of rows, another one odd numbers and a single row."""
    net = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))  # noqa: E731
    forward = called(net, "2", (8, 6, 7, 3, 1, 5, 12), pins={"0.weight": "R", "2.weight": "R"}, input_layouts={"args[0]": "S(0)"})
    assert len(forward.programs) == 3 and not forward.programs[0].sizes and forward.programs[2].sizes[0].unit == 1


def computed_rows() -> None:
    """A size that is an expression of another one stays static, and a log line says so."""
    with logged() as said:
        forward = called(Doubled, "inner", (8, 6))
    assert len(forward.programs) == 3 and not any(program.sizes for program in forward.programs)
    if torch.distributed.get_rank() == 0:
        assert any("sizes stay static: " in text and "whose size is computed from others" in text for text in said), said


found, test_two_ranks = two_ranks(any_rows, computed_rows)
