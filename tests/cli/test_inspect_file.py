"""``fxshard inspect``: no torch for what a file says by itself, the parts and their JSON, and errors that say where."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import fxshard
from fxshard import archive
from fxshard.archive.compiled import CompiledCode, CompiledModel, describe
from fxshard.cli import main as cli
from fxshard.cli.inspect_file import stored
from fxshard.errors import FileError
from fxshard.files import write_sealed
from fxshard.plans.plan_data import Place
from fxshard.plans.sharding_plan import ShardingPlan
from tests.archive.hostile import MANIFEST, edited, entries, pack
from tests.plans.small_plans import by_hand, small_plan
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


def test_torch_is_not_imported_for_dynamic_sizes(tmp_path: Path) -> None:
    path = str(tmp_path / "program.pt2")
    model, rows = torch.nn.Linear(8, 4), torch.export.Dim("rows", max=64)
    program = fxshard.export(model, (torch.ones(4, 8),), fxshard.Mesh({"tp": 2}), dynamic_shapes=({0: rows},), input_layouts="S(0)")
    program.save(path)
    said = printed(["inspect", path])
    assert "rows x 4" in said and "from 1 to 64" in said


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.main(["inspect", *arguments]) == code
    told = capsys.readouterr()
    return told.err if code else told.out


def test_the_file_says_what_the_live_plan_says(plan: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fxshard import inspect

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


def test_a_pipe_gets_reasons_in_full_and_a_terminal_a_fitting_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, module = str(tmp_path / "plan.json"), ".".join(f"a_part_of_a_long_name_{k}" for k in range(9))
    dataclasses.replace(small_plan(), places={"mm": Place(module)}, reads={"output": ("mm",)}).save(path)
    assert module in run([path, "--collectives"], capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert max(map(len, run([path, "--collectives"], capsys).splitlines())) <= 160


def test_the_peak_is_said_once(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([plan, "--memory"], capsys).splitlines()[:2] == ["peak per device  64 bytes", "limit            1.07 GB"]


def test_wrong_arguments_say_what_to_do(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", plan, "--why", "x"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "invalid int value: 'x'" in said
    assert "to do: fxshard inspect --help" in said and len(said.splitlines()) == 3


def test_compiled_code_in_a_file_is_said(tmp_path: Path) -> None:
    """Read from the archive alone."""
    assert "compiled code  for cpu, for 2 of 2 size classes" in printed(["inspect", str(with_code(tmp_path))])


def with_code(folder: Path) -> Path:
    program = small_program(5)
    model = CompiledModel(b"not run", b"{}", {**describe(program, ()), "AOTI_DEVICE_KEY": "cpu"})
    archive.save(program, folder / "code.pt2", compiled=CompiledCode({"model": model, "model_1": model}, b"not run"))
    return folder / "code.pt2"


HELD = {  # entries that are changed in an archive, with the right hashes in its manifest
    "a pickle": {"data/sample_inputs/model.pt": pickle.dumps(print)},
    "a planning graph alone": {"extra/fxshard/planning_graph.json": b"{}"},
    "a runner alone": {"fxshard/compiled_runner.so": b"not run"},
    "code alone": {"data/aotinductor/model/model.wrapper.so": b"not run"},
    "a graph too many": {"models/model_2.json": b"{}"},
    "a description that is a list": {"extra/fxshard/program.json": b"[]"},
}


@pytest.mark.parametrize("changed", HELD.values(), ids=list(HELD))
def test_entries_that_the_program_does_not_have(changed: dict[str, bytes], program: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(program)
    pack(path, entries(path) | changed)
    said = run([program], capsys, 2)
    with pytest.raises(FileError) as caught:
        archive.load(program)
    assert said == f"{caught.value}\n"


def test_weights_of_too_many_ranks(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = entries(Path(program))
    manifest = json.loads(data[MANIFEST]) | {"rank_files": [{"bytes": 1, "sha256": "0"}] * 7}
    pack(Path(program), data | {MANIFEST: json.dumps(manifest).encode()}, vouch=False)
    assert "the weights of 7 ranks, the program's mesh has" in run([program], capsys, 2)


@pytest.mark.parametrize("said", [[1], {"AOTI_DEVICE_KEY": 1}])
def test_metadata_of_compiled_code_that_are_damaged(said: Any, tmp_path: Path) -> None:
    path = with_code(tmp_path)
    entry = "data/aotinductor/model/model.wrapper_metadata.json"
    with pytest.raises(FileError, match="wrapper_metadata"):
        _ = stored(str(edited(path, entry, lambda _: said))).program


def test_a_trace_and_drawings(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, drawing = str(tmp_path / "trace.json"), str(tmp_path / "graph.svg")
    asked = [plan, "--timeline", trace, "--graph", drawing]
    assert json.loads(run([*asked, "--json"], capsys)) == {"timeline": trace, "graph": drawing}
    for path in map(Path, (trace, drawing)):
        path.unlink()  # each is written with --json, and without
    assert f"wrote {trace}" in run(asked, capsys)
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["cat"], e["ts"], e["dur"]) for e in events] == [("device", 0.0, 3.25), ("tp", 3.25, 7.5)]
    assert events[1]["args"]["reason"].startswith("partial sum")
    assert "lin" in [text.text for text in ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert "cannot tell from 'graph.png'" in run([plan, "--graph", "graph.png"], capsys, 2)


def damaged(change: Any) -> dict[str, Any]:
    data = json.loads(by_hand(small_plan()))
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


def test_every_changed_figure_is_noticed(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fits the plan's sums too; by the screen and by the strict reader."""
    written = Path(plan).read_text()
    Path(plan).write_text(written.replace('"parameter": 64', '"parameter": 65'))
    assert "the plan was changed after it was written" in (said := run([plan], capsys, 2)) and 'remove its line "sha256"' in said
    with pytest.raises(FileError, match="changed after it was written"):
        ShardingPlan.load(plan)
    Path(plan).write_text("".join(line for line in Path(plan).read_text().splitlines(keepends=True) if "sha256" not in line))
    assert "parameter 65 bytes" in run([plan], capsys)


def test_a_plan_that_someone_forged_ends_in_an_error_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the right hash over fields that no plan has."""
    path = tmp_path / "plan.json"
    path.write_text(write_sealed(damaged(lambda d: d["nodes"].__setitem__(2, 7))))
    assert "nodes[2]" in run([str(path)], capsys, 2)


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, drawing, evil = tmp_path / "plan.json", tmp_path / "graph.svg", "x\x1b[31m\x9b2J\u202e"
    dataclasses.replace(small_plan(), model=evil, places={"mm": Place(evil)}, lines={"mm": evil}).save(path)
    told = run([str(path)], capsys) + run([str(path), "--nodes", "--collectives", "--graph"], capsys) + str(ShardingPlan.load(path))
    assert told.count("x\\x1b[31m\\x9b2J\\u202e") > 3
    assert all(char.isprintable() or char == "\n" for char in told)
    run([str(path), "--graph", str(drawing)], capsys)
    ElementTree.parse(drawing)
    path.write_text(path.read_text().replace('"format"', '"format\\u001b"', 1))
    assert "\x1b" not in run([str(path)], capsys, 2)


def test_a_plan_without_its_list_of_collectives_is_read_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damaged(lambda d: d.pop("collectives"))))
    assert "1 collective, 48 bytes" in run([str(path)], capsys)
