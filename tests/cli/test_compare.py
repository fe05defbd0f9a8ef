"""``fxshard compare``: a row and a sentence for each known plan; differences that add up; plans that a mesh does not have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.errors import OptionError
from fxshard.plans.plan_data import Certificate
from fxshard.plans.plan_text import view_of
from fxshard.views.compared import Compared, compared_text, sentence
from tests.plans.small_plans import small_plan

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.sum()

def training():
    return Net(), (torch.ones(8, 16, 64),)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:training"


def test_known_plans_cost_no_less(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", model, "--mesh", "tp=4", "--plans", "auto,ddp,fsdp,hsdp,megatron,megatron+sp", "--json"]) == 0
    rows = {row["plan"]: row for row in json.loads(capsys.readouterr().out)}
    assert "no plan: hsdp needs two axes" in rows["hsdp"]["why"] and "objective" not in rows["hsdp"]
    others = [row for name, row in rows.items() if name not in ("auto", "hsdp")]
    assert len(others) == 4 and all(row["objective"] >= rows["auto"]["objective"] * (1 - 1e-9) for row in others)
    for row in others:
        assert row["compute"] + sum(row["exposed"].values()) == pytest.approx(row["objective"])


def test_a_sentence_says_where_the_difference_is() -> None:
    """The other plan's all-reduce takes 17.5 us instead of 7.5, and its product 1 us less."""
    plan = small_plan()
    (move,) = plan.redistributions
    nodes = tuple(dataclasses.replace(n, compute=n.compute - 1) if n.name == "mm" else n for n in plan.nodes)
    certificate = Certificate("microseconds", 19.75, 10.75)
    other = dataclasses.replace(plan, nodes=nodes, redistributions=(dataclasses.replace(move, cost=17.5),), certificate=certificate)
    said = sentence(Compared("auto", view_of(plan)), Compared("fsdp", view_of(other)))
    assert said.startswith(
        "costs 9 us (83.7%) more: 10 us more communication on tp, 1 us less compute; most by all_reduce on tp (1 instead of 1)"
    )
    table = compared_text([Compared("auto", view_of(plan)), Compared("fsdp", None, "nothing fits"), Compared("ddp", view_of(plan))])
    assert "fsdp  no plan: nothing fits" in table and "ddp   costs the same as auto" in table


def test_errors_of_the_user(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in ((["--plans", "autos"], "did you mean 'auto'"), (["--parallel", "tp=fsdp"], "--parallel would have no effect")):
        assert cli.main(["compare", model, "--mesh", "tp=4", *given]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(OptionError, match="give each once"):
        from fxshard.cli.compare import read_plans

        read_plans("auto,auto")
