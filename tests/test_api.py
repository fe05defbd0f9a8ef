"""The public functions: plans depend only on their input, and bad input raises errors with a remedy."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import CNN, MLP, Llama

import fxshard
from fxshard.errors import FxshardError, OptionError, PlanError, TraceError

MESH = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
PLAN = """
import torch, fxshard
from zoo import CNN, Llama
with torch.device("meta"):
    llama, tokens = Llama.small(), torch.zeros(4, 8, dtype=torch.int64)
mesh = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
print(fxshard.plan(llama, (tokens, tokens), mesh, output_layouts="RR").to_json())
free = fxshard.plan(llama, (tokens, tokens), mesh, train=False, input_layouts="S(0)S(1)", output_layouts="RR", objective="communication")
print(free.to_json())
images = torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)
print(fxshard.plan(CNN(), images, fxshard.Mesh({"a": 3}), memory_limit=36000).to_json())
"""


def test_two_processes_make_the_same_plan_byte_for_byte() -> None:
    """String hashes differ between the processes, and this one has planned other models before."""
    root = Path(__file__).parents[1]
    paths = os.pathsep.join(map(str, (root, root / "tests" / "models")))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PLAN], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(PLAN, {})
    assert done.stdout == here.getvalue() and done.stdout.count("graph_hash") == 3


@pytest.mark.parametrize("train", [True, False])
def test_meta_and_cpu_have_one_graph_and_one_plan(train: bool) -> None:
    plans = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            llama, tokens = Llama.small(), torch.zeros(4, 8, dtype=torch.int64)
        plans.append(fxshard.plan(llama, (tokens, tokens), MESH, train=train))
    meta, cpu = plans
    assert meta.graph_hash == cpu.graph_hash and meta.to_json() == cpu.to_json() and meta.hash == cpu.hash


def test_weights_do_not_matter_shapes_and_mode_do() -> None:
    x = torch.ones(8, 16)
    one, other = fxshard.plan(MLP(), (x,), MESH), fxshard.plan(MLP(), (2 * x,), MESH)
    assert one.to_json() == other.to_json()
    hashes = {one.graph_hash, fxshard.plan(MLP(), (x[:4],), MESH).graph_hash, fxshard.plan(MLP(), (x,), MESH, train=False).graph_hash}
    assert len(hashes) == 3


def test_planning_changes_neither_the_model_nor_its_mode() -> None:
    model = CNN()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fxshard.plan(model, (torch.ones(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)), MESH)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_two_objectives() -> None:
    """ "communication" counts only bytes sent, so that a replicated plan costs 0; "time" is in microseconds."""
    x = torch.ones(8, 16)
    sent = fxshard.plan(MLP(), (x,), MESH, objective="communication")
    assert (sent.certificate.unit, sent.objective, sent.lower_bound, sent.gap, sent.collectives) == ("bytes", 0, 0, 0, ())
    timed = fxshard.plan(MLP(), (x,), MESH)
    assert timed.certificate.unit == "microseconds" and 0 < timed.lower_bound <= timed.objective
    pins = {"*.weight": "RS(0)"}
    forced = fxshard.plan(MLP(), (x,), MESH, pins=pins, input_layouts="RR", output_layouts="RR", objective="communication")
    assert forced.objective == sum(c.bytes for c in forced.collectives) > 0


def test_public_names_exist_and_others_are_errors() -> None:
    for name in fxshard.__all__:
        assert getattr(fxshard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = fxshard.paralelize  # type: ignore[attr-defined]  # a misspelt name is what is tested


def refused(error: type[FxshardError], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=said) as caught:
        call()
    assert caught.value.what and caught.value.remedy


def test_plans_for_another_model_shape_or_mode_are_refused() -> None:
    x = torch.ones(8, 16)
    plan = fxshard.plan(MLP(), (x,), MESH)
    for model, args in ((MLP(3), (x,)), (MLP(), (x[:4],)), (MLP(), (x.double(),)), (nn.Linear(16, 16), (x,))):
        model = model.to(args[0].dtype)
        refused(PlanError, "the plan is for another graph", lambda model=model, args=args: fxshard.lower(model, args, plan))
    refused(OptionError, "the plan is for training", lambda: fxshard.export(MLP(), (x,), MESH, plan))
    other = fxshard.Mesh({"dp": 4})
    refused(PlanError, "for mesh dp=2,tp=2, not dp=4", lambda: fxshard.export(MLP(), (x,), other, plan))
    refused(PlanError, "for mesh dp=2,tp=2, not dp=4", lambda: fxshard.simulate(MLP(), (x,), plan, mesh=other))


def test_options_that_a_given_plan_would_ignore_are_refused() -> None:
    x = torch.ones(8, 16)
    plan = fxshard.plan(MLP(), (x,), MESH, train=False)
    wishes = {"pins": {"a": "RR"}, "input_layouts": "RR", "output_layouts": "RR", "memory_limit": 9, "objective": "communication"}
    wishes["constraints"] = [fxshard.Pin("a", "RR")]
    for name, value in wishes.items():
        refused(OptionError, f"{name} would be ignored", lambda n=name, v=value: fxshard.export(MLP(), (x,), MESH, plan, **{n: v}))
    fxshard.export(MLP(), (x,), MESH, plan, objective="time")


def test_wrong_device_meshes_pins_and_constraints_are_refused() -> None:
    x, made = torch.ones(8, 16), fxshard.export(MLP(), (torch.ones(8, 16),), MESH)
    for bad in (MESH, 3, None):
        for call in (
            lambda bad=bad: fxshard.parallelize(MLP(), (x,), bad),
            lambda bad=bad: fxshard.local_batch(x, bad),
            lambda bad=bad: made.bind(bad),
        ):
            refused(OptionError, "a torch DeviceMesh is needed", call)
    refused(OptionError, "pins map names to layouts", lambda: fxshard.plan(MLP(), (x,), MESH, pins=5))
    refused(OptionError, "pins map names to layouts", lambda: fxshard.export(MLP(), (x,), MESH, pins=[("a", "RR")]))
    refused(OptionError, "among the constraints is a tuple", lambda: fxshard.plan(MLP(), (x,), MESH, constraints=[("a", "RR")]))
    refused(OptionError, "constraints are given as a Pin", lambda: fxshard.export(MLP(), (x,), MESH, constraints=fxshard.Pin("a", "RR")))
    refused(OptionError, "not an nn.Module", lambda: fxshard.parallelize(3, (x,), MESH))


def test_wrong_meshes_and_models_that_do_not_trace_are_refused() -> None:
    x = torch.ones(8, 16)
    refused(OptionError, "expected a fxshard.Mesh", lambda: fxshard.plan(MLP(), (x,), {"tp": 2}))  # type: ignore[arg-type]  # the wrong type is what is tested

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    refused(TraceError, "Branch|trace|graph", lambda: fxshard.plan(Branch(), (x,), MESH))
