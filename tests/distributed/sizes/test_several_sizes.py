"""Plans for several example sizes, and memory limits that hold at the largest size, on two ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.export import Dim

import fxshard
from fxshard.errors import OptionError
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import two_ranks
from tests.distributed.sizes.test_any_size import Perceptron, made, mesh, rows, same

pytestmark = pytest.mark.distributed

OPEN, UP_TO = {"x": {0: "batch"}}, {"x": {0: Dim("batch", max=64)}}


def pair(dims: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = Perceptron().double()
    given = {"compiler": "eager", "cache": False, "dynamic_shapes": dims, **options}
    return parallelize(copy.deepcopy(model), rows(4), mesh(), **given), model


def plan_of(module: nn.Module) -> fxshard.ShardingPlan:
    return next(iter(module.forward.programs)).plan  # type: ignore[union-attr]


def warnings_of(module: nn.Module, calls: Sequence[tuple[Tensor, ...]]) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    try:
        for args in calls:
            module(*args)
    finally:
        logging.getLogger("fxshard").removeHandler(handler)
    return [line for line in said if "memory_limit" in line]


def the_plan_is_for_the_example_sizes() -> None:
    sizes = [((2,), 3), ((32,), 1)]
    sharded, single = pair(UP_TO, example_sizes=sizes)
    options: dict[str, Any] = {"input_layouts": "R", "output_layouts": "R", "cache": False, "dynamic_shapes": UP_TO}
    plan = fxshard.plan(single, rows(4), as_mesh(mesh()), example_sizes=sizes, **options)
    assert plan_of(sharded).example_sizes == plan.example_sizes and plan_of(sharded).objective == plan.objective
    for count in (4, 2, 32, 64):
        same(sharded, single, rows(count))
    assert made(sharded) == 1
    for count in (7, 1):  # these need programs of their own: shards are uneven, or one is empty
        same(sharded, single, rows(count))
    copied = copy.deepcopy(sharded)
    copied.load_state_dict(sharded.state_dict())
    same(copied, single, rows(12))
    with pytest.raises(OptionError, match="example_sizes are of dynamic dims"):
        pair(None, example_sizes=sizes)


def a_call_beyond_the_memory_limit_warns_once() -> None:
    """Without a max the limit holds at the example's batch and a call at 512 exceeds it; with a max it holds there."""
    options: dict[str, Any] = {"input_layouts": "S(0)"}
    sharded, single = pair(OPEN, memory_limit=40_000, **options)
    assert plan_of(sharded).memory_sizes == {"batch": 4}
    assert not warnings_of(sharded, [rows(8), rows(4)])
    said = warnings_of(sharded, [rows(512), rows(1024), rows(512)])
    assert len(said) == (mesh().get_rank() == 0)
    assert all("a call at batch=512 takes " in line and "more than memory_limit=40.0 KB, which holds at batch=4" in line for line in said)
    same(sharded, single, rows(512))
    sharded, _ = pair(UP_TO, memory_limit=40_000, **options)
    assert plan_of(sharded).memory_sizes == {"batch": 64} and not warnings_of(sharded, [rows(64), rows(32)])


found, test_two_ranks = two_ranks(the_plan_is_for_the_example_sizes, a_call_beyond_the_memory_limit_warns_once)
