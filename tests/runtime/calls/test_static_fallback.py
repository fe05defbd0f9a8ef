"""If no program can serve all sizes, a call is planned again for its own sizes, under the autocast of the user's call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
import fxshard.runtime.backend.backend as by_backend
import fxshard.runtime.module.module as by_parallelize
from fxshard.errors import SizesError


def parallelized(model: nn.Module, mesh: DeviceMesh) -> Any:
    return fxshard.parallelize(copy.deepcopy(model), (torch.randn(2, 4),), mesh, compiler="eager", train=False)


def compiled(model: nn.Module, mesh: DeviceMesh) -> Any:
    return torch.compile(model, backend="fxshard", options={"mesh": mesh, "compiler": "eager"}, dynamic=True)


@torch.no_grad()
@pytest.mark.parametrize(("make", "where"), [(parallelized, by_parallelize), (compiled, by_backend)], ids=["parallelize", "backend"])
def test_the_static_program_keeps_the_users_autocast(
    make: Callable[..., Any], where: Any, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    real, model = where.lower_plan, nn.Linear(4, 4)

    def of_static_graphs(graph: Any, *others: Any) -> Any:
        if graph.family is not None:
            raise SizesError("not here", remedy="none")
        return real(graph, *others)

    sharded = make(model, mesh)
    with mock.patch.object(where, "lower_plan", of_static_graphs), torch.autocast("cpu", dtype=torch.bfloat16):
        for rows in (2, 6):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(sharded(x), model(x), atol=0.05, rtol=0.05)  # checks the dtype too
    assert "no program can serve all these sizes: not here" in caplog.text
