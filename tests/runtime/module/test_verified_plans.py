"""parallelize applies the rules once to a plan of its own, when planning. It checks a given plan before lowering."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.errors import PlanError
from fxshard.passes import pipeline
from fxshard.passes.pipeline import plan_graph
from fxshard.plans.plan_data import OpSpec

ARGS = (torch.ones(4, 4),)
OPTIONS: dict[str, Any] = {"train": False, "compiler": "eager", "cache": False}


def test_rules_are_applied_once_to_its_own_plan(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], pipeline.annotate.annotate
    monkeypatch.setattr(pipeline.annotate, "annotate", lambda *given: asked.append(given) or real(*given))
    fxshard.parallelize(nn.Linear(4, 4), ARGS, mesh, **OPTIONS)
    assert len(asked) == 1
    fxshard.parallelize(nn.Linear(4, 4), ARGS, mesh, planner=lambda *given: plan_graph(*given), **OPTIONS)
    assert len(asked) == 3, "a planner of the user may return any plan"


def test_a_plan_that_no_rule_allows_is_refused(mesh: DeviceMesh) -> None:
    plan = fxshard.plan(nn.Linear(4, 4), ARGS, mesh, train=False, input_layouts="R", output_layouts="R", cache=False)
    fxshard.parallelize(nn.Linear(4, 4), ARGS, mesh, plan, compiler="eager")
    product = next(node for node in plan.nodes if node.op == "fxshard.einsum.default")
    pending = dataclasses.replace(product, spec=OpSpec(product.spec.inputs, (fxshard.Layout.parse("P"),)))
    wrong = dataclasses.replace(plan, nodes=tuple(pending if node is product else node for node in plan.nodes))
    with pytest.raises(PlanError, match=r"nothing brings|cannot run as"):
        fxshard.parallelize(nn.Linear(4, 4), ARGS, mesh, wrong, compiler="eager")
    with pytest.raises(PlanError, match=r"nothing brings|cannot run as"):
        fxshard.parallelize(nn.Linear(4, 4), ARGS, mesh, planner=lambda *_: wrong, **OPTIONS)
