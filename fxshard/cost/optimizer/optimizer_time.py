"""Time of the optimiser's step, which a plan's objective leaves out: it is memory traffic of each rank's shards."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxshard.cost.compute import traffic_time
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.layout.layouts import ceil_shape
from fxshard.plans.plan_data import PlanData


def optimizer_time(plan: PlanData, optimizer: Any) -> float:
    """Microseconds of a fused step on one rank: it reads parameters, gradients and state, and writes parameters and state.

    ``optimizer``: as for ``fxshard.plan``; ``"none"`` takes no time. Raises OptionError for an unknown one.
    """
    kind = Optimizer.of(optimizer)
    if kind.kind == "none":
        return 0.0
    moved = 0
    for end in plan.inputs:
        if end.kind != "parameter":
            continue
        node = next(one for one in plan.nodes if one.name == end.node)
        dtype = getattr(torch, node.dtypes[0])
        elements = math.prod(ceil_shape(node.shapes[0], node.spec.outputs[0], plan.mesh.shape))
        moved += elements * (3 * dtype.itemsize + 2 * kind.bytes_per_element(dtype))
    return traffic_time(plan.mesh.hardware, moved)
