"""Plans and reports that the tests of the HTML report share, each made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

import fxshard
from examples.llama import Llama
from fxshard.cli.arguments.factory import load_model
from fxshard.inspect.report import Parts
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.passes.pipeline import lower_plan
from fxshard.plans.sharding_plan import ShardingPlan


@cache
def llama_plan() -> ShardingPlan:
    """Two layers, training, on 2 x 2 H100s: wide enough that the plan communicates."""
    with torch.device("meta"):
        model = Llama.small(dim=1024, heads=8, kv_heads=4, ffn=4096, vocab=4096)
        tokens = torch.zeros(8, 512, dtype=torch.int64)
    return fxshard.plan(model, (tokens, tokens), fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100"), optimizer="adamw", memory_limit="2GB")


@cache
def small_plan() -> ShardingPlan:
    """Two products, on 2 x 2 H100s."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return fxshard.plan(model, (torch.ones(64, 1024),), fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100"))


def parts_of(plan: ShardingPlan, **more: object) -> Parts:
    program = lower_plan(plan.origin.annotated.graph, plan)
    return Parts(title="test", program=program, timeline=predicted(program), memory=plan.memory_profile(), **more)


@cache
def llama_page() -> Path:
    """A report of the Llama with the alternatives of a parameter."""
    path, plan = Path(mkdtemp()) / "report.html", llama_plan()
    fxshard.save_report(plan, path, title="Llama", answers=[plan.explain("output.weight")])
    return path


@cache
def large_page() -> Path:
    """A report of Llama 3 8B, training, 32 layers on 8 x 8."""
    model, args, _ = load_model(f"{Path(fxshard.__file__).parents[1]}/examples/llama3_8b.py:training")
    path = Path(mkdtemp()) / "report.html"
    fxshard.save_report(fxshard.plan(model, args, fxshard.Mesh({"dp": 8, "tp": 8}, hardware="h100")), path)
    return path
