"""The planning bench on one layer of its models: it measures what ``fxshard.plan`` does, and traces by torch alone run."""

from __future__ import annotations

import pytest

import fxshard
from bench.planning import child, measure
from bench.planning.__main__ import LAYERS, main
from bench.planning.measure import BARE
from bench.planning.models import MODELS


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_quiet", lambda: None)  # it would silence this process for the tests that follow


def test_the_plan_is_that_of_fxshard_plan_and_lowering_is_measured_pass_by_pass() -> None:
    measured = child.ours("llama", 1, "dp=2,tp=2", "h100", None, lower=True)
    model, args, kwargs = MODELS["llama"](1)
    plan = fxshard.plan(model, args, fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100"), kwargs)
    assert (measured.hash, measured.gap) == (plan.hash, plan.gap)
    names = [s.name for s in measured.stages]
    assert names[:6] == ["trace", "annotate", "constrain", "formulate", "choose", "verify"]
    assert names[-4:] == ["lower", "schedule", "chunk", "bucket"]
    assert all(s.wall >= 0 and s.memory > 1e8 for s in measured.stages)


@pytest.mark.parametrize("kind", child.KINDS)
def test_bare_trace_makes_a_joint_graph(kind: str) -> None:
    fakes, graph = child.bare(kind, "llama", 1).stages
    assert fakes.made == "fake tensors" and graph.made.startswith("graph of ")


def test_tables_cover_all_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(BARE) == child.KINDS and LAYERS.keys() == MODELS.keys()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--growth" in capsys.readouterr().out
