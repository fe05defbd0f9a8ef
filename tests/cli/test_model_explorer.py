"""``fxshard inspect PROGRAM --model-explorer``: values under the names that Model Explorer gives the nodes of a .pt2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxshard.ops  # noqa: F401  (torch.export.load needs the operators of the file)
from fxshard import archive
from fxshard.cli import main as cli
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.views.model_explorer import REPLICATED, texts
from tests.plans.small_plans import small_plan
from tests.programs import small_program


def test_values_are_keyed_by_the_names_of_the_exported_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Model Explorer's adapter for .pt2 shows ``torch.export.load(path).graph``, and its node ids are the nodes' names."""
    program, path = small_program(6), tmp_path / "program.pt2"
    archive.save(program, path)
    assert cli.main(["inspect", str(path), "--model-explorer", str(tmp_path / "out.json")]) == 0
    told = capsys.readouterr().out
    shown = {node.name for node in torch.export.load(path).graph.nodes}
    data = {kind: json.loads((tmp_path / f"out.{kind}.json").read_text()) for kind in ("time", "layout", "memory")}
    for kind, one in data.items():
        assert f"out.{kind}.json" in told and one["results"] and set(one["results"]) <= shown
        assert set(one) <= {"name", "results", "gradient", "showExpandedSummaryOnGroupNode"}
    times = {event.name: event.end - event.start for event in predicted(program).events}
    assert {node: one["value"] for node, one in data["time"]["results"].items()} == times
    layouts = {node: one["value"] for node, one in data["layout"]["results"].items()}
    reduced = dict.fromkeys(("all_reduce_default", "wait_tensor_default"), "S(0)R")
    assert layouts == {"w": "RS(0)", "x": "S(0)S(1)", "einsum_default": "S(0)P", **reduced}
    held = {node: one["value"] for node, one in data["memory"]["results"].items()}
    sizes = {"w": 4 * 4 * 4, "x": 3 * 4 * 4, "y": 3 * 4 * 4}  # bytes of a rank's blocks
    assert held["einsum_default"] == sum(sizes.values()) and held["all_reduce_default"] == sum(sizes.values()) + sizes["y"]


def test_json_writes_the_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive.save(small_program(6), tmp_path / "program.pt2")
    assert cli.main(["inspect", str(tmp_path / "program.pt2"), "--model-explorer", str(tmp_path / "out.json"), "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named == [str(tmp_path / f"out.{kind}.json") for kind in ("time", "layout", "memory")]
    assert all(json.loads(Path(name).read_text())["results"] for name in named)


def test_layouts_have_colours_and_replication_none() -> None:
    made = texts("layout", {"a": "S(0)R", "b": "RR", "c": "S(0)R", "d": "RP"})["results"]
    assert made["a"] == made["c"] and made["b"] == {"value": "RR", "bgColor": REPLICATED}
    assert len({one["bgColor"] for one in made.values()}) == 3


def test_a_plan_has_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_plan().save(tmp_path / "plan.json")
    assert cli.main(["inspect", str(tmp_path / "plan.json"), "--model-explorer", "out.json"]) == 2
    assert "give a program that fxshard export -o wrote" in capsys.readouterr().err
