"""What a planned pipeline says: stages, memory limits, links, and what is refused."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard import progress
from fxshard.errors import ConstraintError, OptionError, PlanError
from fxshard.mesh.mesh import Mesh
from fxshard.pipelines.plan import PipelinePlan, inner_mesh
from fxshard.pipelines.prices import examples
from fxshard.pipelines.split import split_layers
from tests.pipelines.test_split import AllTwice, Net, Repeated, arguments

MESH = fxshard.Mesh({"pp": 2, "dp": 2})


class Wide(nn.Module):
    """Eight equal layers and one that is called ``calls`` times: it takes the time of several and the memory of one."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(self.calls):
            x = self.head(x)
        return x.logsumexp(-1)


def planned(model: nn.Module, **options: Any) -> PipelinePlan:
    with torch.device("meta"):
        example = torch.empty(64, 256)
    return fxshard.plan_pipeline(model.to("meta"), (example,), MESH, **{"microbatches": 4, "cache": False, **options})


def test_stages_take_equal_time() -> None:
    plan = planned(Wide(0))
    assert [len(stage.layers) for stage in plan.stages] == [4, 4] and plan.starts == ("layers.4",)
    plan = planned(Wide(6))
    counts = [len(stage.layers) for stage in plan.stages]
    assert counts[0] > counts[1] and sum(counts) == 8
    assert max(s.time for s in plan.stages) < 1.5 * min(s.time for s in plan.stages)
    text = str(plan)
    assert re.search(r"0 +layers.0 .. layers.\d +\d", text) and f"bubble {plan.bubble:.1%}" in text
    assert PipelinePlan.from_json(plan.to_json(), MESH, "pp", 4, "1F1B") == plan


def test_a_pipeline_that_devices_cannot_hold_says_so() -> None:
    plan = planned(Wide(0))
    assert "Does not fit" not in str(plan)
    small = Mesh(
        dict(zip(MESH.axis_names, MESH.shape, strict=True)), replace(MESH.hardware, name="small", memory=plan.stages[0].memory - 1)
    )
    assert "Does not fit: small has " in str(replace(plan, mesh=small))


def test_a_layer_costs_what_its_own_plan_does() -> None:
    model, words = Wide().to("meta"), {"dp": fxshard.DataParallel()}
    plan = planned(model, parallel=words, optimizer="adamw")
    _, pieces = split_layers(model, (torch.empty(64, 256, device="meta"),), {})
    inside = {"input_layouts": "S(0)", "output_layouts": "S(0)", "parallel": words, "optimizer": "adamw", "cache": False}
    alone = fxshard.plan(pieces[1].module, examples(pieces[1].inputs), inner_mesh(MESH, "pp"), **inside)
    assert set(map(str, plan.layouts.values())) == {"S(0)"}
    first = plan.stages[0]
    assert first.time == pytest.approx(len(first.layers) * alone.objective, rel=0.25)
    weights = 4 * (256 * 256 + 256)
    state = alone.memory["parameter"] + alone.memory["optimizer"]
    assert state == pytest.approx(3 * weights, rel=0.01)
    activations = (first.in_flight - 1) * 2 * 4 * 32 * 256  # what each layer saves: its input and its result
    assert first.memory == pytest.approx(len(first.layers) * (5 * weights + activations), rel=0.15)  # two copies of the gradients


def test_a_memory_limit_moves_the_cut_or_is_refused() -> None:
    free = planned(Wide(6), optimizer="adamw")
    with pytest.raises(ConstraintError, match=r"no cut into 2 stages fits in memory_limit=100 KB") as error:
        planned(Wide(6), optimizer="adamw", memory_limit=100_000)
    least = int(re.search(r"some cut needs .*?([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    tight = planned(Wide(6), optimizer="adamw", memory_limit=least)
    assert max(stage.memory for stage in tight.stages) == least < max(stage.memory for stage in free.stages)
    assert all(stage.memory_limit is None for stage in free.stages)
    for stage in tight.stages:  # what one microbatch needs beside the sums of gradients and what others saved
        assert stage.memory_limit is not None and 0.5 * stage.memory < stage.memory_limit < least
    assert tight.step_time > free.step_time and tight.starts != free.starts


@pytest.mark.filterwarnings("error")
def test_planning_warns_of_nothing_and_shows_its_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    planned(Wide())
    assert terminal.getvalue() == ""
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    for name, seconds in (("PATIENCE", 0.0), ("TICK", 0.01)):
        monkeypatch.setattr(progress, name, seconds)
    planned(Wide())
    assert re.search(r"planning layers: \d/8 ", terminal.getvalue()) and "Warning" not in terminal.getvalue()


def test_interleaved_stages_wait_less_and_share_the_memory_of_a_rank() -> None:
    two, four = planned(Wide(0)), planned(Wide(0), schedule="Interleaved1F1B")
    assert [len(stage.layers) for stage in four.stages] == [2, 2, 2, 2] and four.several == 2
    assert 1 / 9 < four.bubble < two.bubble < 0.3  # stages between others wait for two transfers
    with pytest.raises(ConstraintError, match="no cut into 4 stages fits") as error:
        planned(Wide(0), schedule="Interleaved1F1B", memory_limit=100_000)
    least = int(re.search(r"some cut needs .*?([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    tight = planned(Wide(0), schedule="Interleaved1F1B", memory_limit=least)
    assert 2 * max(stage.memory for stage in tight.stages) == least
    with pytest.raises(OptionError, match="passes microbatches in 2 rounds of equal size, and there are 5"):
        planned(Wide(0), schedule="Interleaved1F1B", microbatches=5)


def test_inner_axes_keep_their_links() -> None:
    between = fxshard.Mesh({"dp": 2, "pp": 2, "tp": 8}, "h100")
    inside = inner_mesh(between, "pp")
    assert inside.axis_names == ("dp", "tp")
    assert [inside.link(i) for i in range(2)] == [between.link(0), between.link(2)]


def test_keyword_arguments_are_taken_as_plan_takes_them() -> None:
    tokens, keep, targets = arguments()
    named = {"targets": targets, "keep": keep}
    plans = [
        fxshard.plan_pipeline(Net(), (tokens,), MESH, microbatches=4, cache=False, **{name: named})
        for name in ("example_kwargs", "mb_kwargs")
    ]
    assert plans[0].to_json() == plans[1].to_json()
    assert plans[0].starts == fxshard.plan_pipeline(Net(), (tokens, keep, targets), MESH, microbatches=4, cache=False).starts
    with pytest.raises(OptionError, match="mb_kwargs and example_kwargs are two names of the same"):
        fxshard.plan_pipeline(Net(), (tokens,), MESH, microbatches=4, example_kwargs=named, mb_kwargs={})
    unknown: Any = {"kwargs": named}
    with pytest.raises(OptionError, match=r"plan_pipeline has no option 'kwargs'\n.*pass the model's keyword arguments as example_kwargs"):
        fxshard.plan_pipeline(Net(), (tokens,), MESH, microbatches=4, **unknown)


def test_layers_that_are_called_again_stay_in_one_stage() -> None:
    class Pairs(Repeated):
        together = 2

    plan = fxshard.plan_pipeline(Pairs(6), arguments()[:1], fxshard.Mesh({"pp": 3, "dp": 2}), microbatches=4, cache=False)
    assert [stage.layers for stage in plan.stages] == [("layers.0", "layers.1"), ("layers.2", "layers.3"), ("layers.4", "layers.5")]


def test_what_pipelines_do_not_support_is_refused() -> None:
    args = arguments()

    def plan(model: nn.Module, mesh: Any = MESH, microbatches: Any = 4, given: Any = args, **options: Any) -> None:
        fxshard.plan_pipeline(model, given, mesh, microbatches=microbatches, **options)

    with pytest.raises(PlanError, match=r"share a parameter, embedding.weight = head.weight, read with layers.0 and with layers.3"):
        plan(Net(tied=True))
    with pytest.raises(PlanError, match=r"share a parameter, layers.0.norm.weight, read with layers.0 and with layers.3"):
        plan(AllTwice(), given=args[:1])
    with pytest.raises(PlanError, match="1 is a BatchNorm1d"):
        plan(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), given=(torch.rand(4, 4),))
    with pytest.raises(PlanError, match=r"Linear has no list of layers"):
        plan(nn.Linear(4, 4), given=(torch.rand(4, 4),))
    with pytest.raises(PlanError, match=r"4 layers, too few for 8 stages"):
        plan(Net(), fxshard.Mesh({"pp": 8, "dp": 1}), 8)
    with pytest.raises(OptionError, match=r"no axis 'pq'"):
        plan(Net(), axis="pq")
    with pytest.raises(OptionError, match=r"microbatches is 1, and the axis 'pp' has 2 stages"):
        plan(Net(), microbatches=1)
    with pytest.raises(OptionError, match=r"unknown schedule '1f1b'"):
        plan(Net(), schedule="1f1b")
    with pytest.raises(OptionError, match=r"no axis besides 'pp'"):
        plan(Net(), fxshard.Mesh({"pp": 2}))
