"""The pass runner: records, and a dump with one readable file for each pass, even for one that fails."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import ConstraintError, FileError, OptionError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import LOWERING, PLANNING, Compilation, Request, run
from fxshard.passes.runner import Pass, run_passes

MESH = Mesh({"a": 2})
NAMES = ["trace", "annotate", "constrain", "formulate", "choose", "verify"]


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(6, 4),)


def files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_records_have_the_name_time_and_result_of_each_pass() -> None:
    state = run((*PLANNING, *LOWERING), Compilation(MESH, Request(*model())))
    assert [r.name for r in state.records] == [*NAMES, "lower", "schedule", "chunk", "bucket"]
    assert all(r.milliseconds > 0 and r.made for r in state.records)
    made = {r.name: r.made for r in state.records}
    assert state.graph is not None and state.plan is not None and state.program is not None
    assert f"{len(list(state.graph.nodes))} nodes" in made["trace"] and state.graph.hash[:12] in made["trace"]
    assert f"{state.plan.objective:.6g}" in made["choose"] and "gap 0" in made["choose"]
    assert f"{len(state.program.collectives)} collectives" in made["lower"]


def test_passes_leave_the_state_before_them_alone() -> None:
    start = Compilation(MESH, Request(*model()))
    run(PLANNING, start)
    assert start.graph is start.plan is None and start.records == ()


def test_a_dump_has_one_file_for_each_pass(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    plan = fxshard.plan(*model(), MESH, dump=folder)
    assert files(folder) == [f"{i:02d}_{name}.txt" for i, name in enumerate(NAMES)]
    text = {name: (folder / f"{i:02d}_{name}.txt").read_text() for i, name in enumerate(NAMES)}
    assert "relu" in text["trace"] and "einsum" in text["trace"]
    assert "relu:\n  R -> R\n  S(0) -> S(0)" in text["annotate"]
    assert str(plan) in text["choose"]
    assert all(f"# {earlier}: " in text["verify"] for earlier in NAMES)
    fxshard.lower(*model(), plan, dump=folder)
    assert "size class" in (folder / "06_lower.txt").read_text()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")

    def refused(folder: Path, **given: Any) -> None:
        with pytest.raises(FileError, match="cannot make the folder") as error:
            fxshard.plan(*model(), MESH, **given)
        assert error.value.where == str(folder) and "name a folder" in str(error.value.remedy)

    refused(tmp_path / "file", dump=tmp_path / "file")
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path / "file" / "below"))
    refused(tmp_path / "file" / "below")


def test_the_error_of_a_failing_pass_is_dumped(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError):
        fxshard.plan(*model(), MESH, pins={"nothing": "R"}, dump=tmp_path)
    assert files(tmp_path) == ["00_trace.txt", "01_annotate.txt", "02_constrain.failed.txt"]
    text = (tmp_path / "02_constrain.failed.txt").read_text()
    assert "pin 'nothing' matches no" in text and "Traceback" in text and text.startswith("# trace: ")


class Broken(nn.Module):
    """A branch on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


def test_the_first_pass_may_fail_too(tmp_path: Path) -> None:
    with pytest.raises(fxshard.FxshardError):
        fxshard.plan(Broken(), (torch.ones(2),), MESH, dump=tmp_path)
    assert files(tmp_path) == ["00_trace.failed.txt"]


def test_an_error_that_is_not_ours_passes_through_and_is_dumped(tmp_path: Path) -> None:
    def stumble(_: Compilation) -> Any:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        run_passes((*PLANNING[:1], Pass("stumble", stumble, str)), Compilation(MESH, Request(*model())), tmp_path)
    assert files(tmp_path) == ["00_trace.txt", "01_stumble.failed.txt"]


def test_the_environment_names_a_folder_and_the_argument_overrides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path / "environment"))
    fxshard.plan(*model(), MESH)
    assert len(files(tmp_path / "environment")) == len(NAMES)
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path / "unused"))
    fxshard.plan(*model(), MESH, dump=tmp_path / "argument")
    assert len(files(tmp_path / "argument")) == len(NAMES) and not (tmp_path / "unused").exists()


def test_an_unknown_objective_is_refused_before_the_first_pass(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown objective 'speed'"):
        fxshard.plan(*model(), MESH, objective="speed", dump=tmp_path)
    assert files(tmp_path) == []


def test_the_pipeline_is_a_literal_tuple() -> None:
    """The module shows the pipeline as names and functions, in order."""
    import fxshard.passes.pipeline as module

    tree = ast.parse(Path(module.__file__).read_text())
    found = {n.target.id: n.value for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for name, passes in (("PLANNING", PLANNING), ("LOWERING", LOWERING)):
        literal: Any = found[name]
        assert isinstance(literal, ast.Tuple)
        assert [e.args[0].value for e in literal.elts] == [p.name for p in passes]


class Airy(nn.Module):
    """An operator that has no rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(x)


def test_operators_without_a_rule_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    plan = fxshard.plan(Airy(), (torch.ones(4, 4),), MESH, train=False)
    assert plan.fallbacks and "replicated for want of a rule" in str(plan)
    assert "replicated for want of a rule" in caplog.text and plan.fallbacks[0][0] in caplog.text
    caplog.clear()
    assert not fxshard.plan(*model(), MESH).fallbacks and "want of a rule" not in caplog.text
