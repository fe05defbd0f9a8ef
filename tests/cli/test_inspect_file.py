"""``fxshard inspect``: no torch for what a file says by itself, the parts and their JSON, and errors that say where."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fxshard import archive
from fxshard.cli import main as cli
from fxshard.plans.plan_data import Place
from tests.plans.small_plans import small_plan
from tests.programs import small_program

CHILD = """
import sys
from fxshard.cli.main import main
assert main(sys.argv[1:]) == 0
late = [name for name in ("torch", "numpy", "sympy", "networkx", "numba") if name in sys.modules]
assert not late, late
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    placed = {"mm": Place("lin"), "x": Place("lin")}
    dataclasses.replace(small_plan(), model="Net", places=placed, reads={"mm": ("x", "w"), "output": ("mm",)}).save(path)
    return str(path)


@pytest.fixture
def program(tmp_path: Path) -> str:
    archive.save(small_program(5), tmp_path / "program.pt2")
    return str(tmp_path / "program.pt2")


def printed(arguments: list[str]) -> str:
    ran = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_torch_is_not_imported(plan: str, program: str) -> None:
    parts = ["--nodes", "--params", "--collectives", "--memory", "--timeline", "--graph"]
    assert "Net, 32 parameters" in printed(["inspect", plan])
    assert "2, one per size class" in printed(["inspect", program])
    assert json.loads(printed(["inspect", plan, "--json", *parts]))["parameters"] == {"lin.weight": "RS(0)"}
    assert "all_reduce_default" in printed(["inspect", program, *parts[:3]])


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.main(["inspect", *arguments]) == code
    told = capsys.readouterr()
    return told.err if code else told.out


def test_the_file_says_what_the_live_plan_says(plan: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fxshard import ShardingPlan, inspect

    assert run([plan], capsys) == f"{ShardingPlan.load(plan)}\n" == f"{inspect.summary(ShardingPlan.load(plan))}\n"
    assert run([program], capsys) == f"{inspect.summary(archive.load(program))}\n"
    assert json.loads(run([plan, "--json"], capsys)) == json.loads(json.dumps(inspect.to_json(ShardingPlan.load(plan))))


@pytest.mark.parametrize(("part", "kind"), [("--nodes", list), ("--params", dict), ("--collectives", list), ("--memory", dict)])
def test_a_part_alone_as_json(plan: str, part: str, kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(json.loads(run([plan, part, "--json"], capsys)), kind)


def test_globs_name_nodes_parameters_and_modules(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    def names(glob: str) -> list[str]:
        return [node["name"] for node in json.loads(run([plan, "--nodes", glob, "--json"], capsys))]

    assert run(["--nodes", plan], capsys) == run([plan, "--nodes"], capsys)
    assert "no file is given" in run(["--nodes", "m*"], capsys, 2)
    assert (names("m*"), names("lin.*"), names("lin")) == (["mm"], ["w"], ["x", "mm"])
    assert "no node matches 'linn'; did you mean 'lin'?" in run([plan, "--nodes", "linn"], capsys, 2)


def test_a_trace_and_drawings(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, drawing = str(tmp_path / "trace.json"), str(tmp_path / "graph.svg")
    assert f"wrote {trace}" in run([plan, "--timeline", trace, "--graph", drawing], capsys)
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["cat"], e["ts"], e["dur"]) for e in events] == [("device", 0.0, 3.25), ("tp", 3.25, 7.5)]
    assert events[1]["args"]["reason"].startswith("partial sum")
    assert "lin" in [text.text for text in ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert "cannot tell from 'graph.png'" in run([plan, "--graph", "graph.png"], capsys, 2)


def damaged(change: Any) -> dict[str, Any]:
    data = json.loads(small_plan().to_json())
    change(data)
    return data


DAMAGE = [
    (lambda d: d.pop("nodes"), "the field 'nodes' is missing"),
    (lambda d: d["nodes"].__setitem__(2, 7), "nodes[2]"),
    (lambda d: d["certificate"].update(objective=11.0), "nodes and redistributions cost 10.75 together"),
    (lambda d: d["collectives"].clear(), "0 collectives are listed, but the plan has 1"),
    (lambda d: d["collectives"][0].update(axis="pp"), "axis is pp"),
    (lambda d: d["mesh"].update(axes=3), "mesh.axes"),
    (lambda d: d["inputs"].append("x"), "inputs[2]"),
]


@pytest.mark.parametrize(("change", "what"), DAMAGE, ids=[what for _, what in DAMAGE])
def test_damage_is_named(change: Any, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damaged(change)))
    assert what in run([str(path)], capsys, 2)


def test_a_plan_without_its_list_of_collectives_is_read_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damaged(lambda d: d.pop("collectives"))))
    assert "1 collective, 48 bytes" in run([str(path)], capsys)
