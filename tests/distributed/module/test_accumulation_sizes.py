"""``no_sync`` with changing sizes, on two ranks: if one rank's program does not serve a call, all make another; and ``cache=False``."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.runtime.module import accumulation, module
from tests.distributed.module.test_hooks import close
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def rows(count: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * count, dtype=torch.float64).view(count, 4).cos()


def pair(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    model, mesh = copy.deepcopy(reference), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"compiler": "eager", "timeout": 60, "input_layouts": {"args[0]": "S(0)"}, "pins": {"*.weight": "R"}, **options}
    return fxshard.parallelize(model, (rows(4),), mesh, **options), reference


def accumulate(model: Any, reference: Any, counts: tuple[int, ...]) -> None:
    with fxshard.no_sync(model):
        for count in counts:
            model(rows(count)).square().sum().backward()
    model(rows(4)).square().sum().backward()
    for count in (*counts, 4):
        reference(rows(count)).square().sum().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def one_rank_refuses() -> None:
    """Only one rank refuses the program that leaves sums pending: both make another one, for that size."""
    model, reference = pair(dynamic_shapes={"input": {0: "rows"}})
    assert len(model.forward.programs) == 1
    real, asked = module.refusal, []

    def refusal(*given: Any) -> str | None:
        asked.append(given)
        return "this rank alone does not serve it" if dist.get_rank() == 1 else real(*given)

    with mock.patch.object(module, "refusal", refusal):
        accumulate(model, reference, (8,))
    sizes = [len(program.sizes) for program in model.forward.programs]
    assert len(asked) == 2 and sorted(sizes) == [0, 0, 1], sizes  # for any number of rows, for 8 and for 4
    other, reference = pair(dynamic_shapes={"input": {0: "rows"}})
    accumulate(other, reference, (8, 6))
    assert len(other.forward.programs) == 1


def without_caches() -> None:
    found: list[tuple[bool, bool]] = []
    real = accumulation.compile_program
    for cache in (False, True):

        def compile_program(*given: Any, cache: bool = True, asked: bool = cache, **options: Any) -> Any:
            found.append((asked, cache))
            return real(*given, cache=cache, **options)

        model, reference = pair(cache=cache)
        with mock.patch.object(accumulation, "compile_program", compile_program):
            accumulate(model, reference, (4,))
    assert found == [(False, False), (True, True)]


found, test_two_ranks = two_ranks(one_rank_refuses, without_caches)
