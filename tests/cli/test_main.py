"""The command line: what it passes on, what it prints, and its errors."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxshard import Communication, Equal, Forbid
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.plans.sharding_plan import ShardingPlan
from tests.distributed.scenarios import run_command
from tests.plans.small_plans import small_plan

MODEL = """
import torch
from torch import nn
from neighbour import WIDTH

def training():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.ones(4, WIDTH),)

def with_keywords():
    return nn.Linear(2, 2), [torch.ones(1, 2)], {"flag": True}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("WIDTH = 16\n")
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Records calls of ``fxshard.plan`` and ``fxshard.export`` instead of running them."""
    from fxshard import api

    found: list[tuple[str, Any]] = []

    def plan(*args: Any, **kwargs: Any) -> ShardingPlan:
        found.append(("plan", (args, kwargs)))
        return small_plan()

    def export(*args: Any, **kwargs: Any) -> Any:
        found.append(("export", (args, kwargs)))
        return SimpleNamespace(save=lambda path, weights: found.append(("save", (path, weights))))

    monkeypatch.setattr(api, "plan", plan)
    monkeypatch.setattr(api, "export", export, raising=False)
    return found


def test_plan_and_inspect_for_real(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "plan.json")
    options = ["--mesh", "dp=2,tp=2", "--hardware", "h100", "--pin", "0.weight=RS(0)"]
    assert cli.main(["plan", f"{model}:training", *options, "-o", output]) == 0
    printed = capsys.readouterr().out
    assert "dp=2,tp=2, 4 devices (h100)" in printed and "gap" in printed and f"wrote {output}" in printed
    plan = ShardingPlan.load(output)
    assert plan.train and str(plan.layout_of("0.weight")) == "RS(0)"

    assert cli.main(["inspect", output]) == 0
    assert capsys.readouterr().out.strip() == printed.partition("\n\nwrote")[0]
    assert cli.main(["inspect", output, "--nodes", "--collectives"]) == 0
    assert "operator" in capsys.readouterr().out
    assert cli.main(["inspect", output, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == plan.hash


def test_options_reach_the_planner(model: str, calls: list[tuple[str, Any]]) -> None:
    options = ["--infer", "--objective", "communication", "--memory-limit", "2GiB", "--pin", "a=b=RR", "--dump", "d"]
    assert cli.main(["plan", f"{model}:with_keywords", "--mesh", "tp=4", *options]) == 0
    ((_, (args, kwargs)),) = calls
    assert str(args[2]) == "tp=4" and kwargs["example_kwargs"] == {"flag": True}
    assert (kwargs["train"], kwargs["objective"], kwargs["memory_limit"], kwargs["pins"]) == (False, "communication", "2GiB", {"a=b": "RR"})


def test_constraints_reach_the_planner(model: str, calls: list[tuple[str, Any]]) -> None:
    texts = ["--equal", "a=b.*=c", "--forbid", "*.weight=RS(0)", "--forbid", "a=P(max)@dp", "--at-most", "dp=1.5GB", "--at-most", "tp=7"]
    assert cli.main(["plan", f"{model}:training", "--mesh", "tp=4", *texts]) == 0
    assert calls[0][1][1]["constraints"] == [
        Equal("a", "b.*", "c"),
        Forbid("*.weight", "RS(0)"),
        Forbid("a", "P(max)", axis="dp"),
        Communication("dp", at_most=1_500_000_000),
        Communication("tp", at_most=7),
    ]


def test_layouts_of_inputs_and_outputs_and_a_time_limit(model: str, calls: list[tuple[str, Any]]) -> None:
    ends = ["--input-layout", "S(0)", "--output-layout", "outputs[0]=R", "--output-layout", "outputs[1]=S(1)"]
    assert cli.main(["plan", f"{model}:training", "--mesh", "tp=4", *ends, "--time-limit", "2.5"]) == 0
    assert cli.main(["export", f"{model}:training", "--mesh", "tp=4", *ends, "-o", "m.pt2"]) in (0, 1)
    (_, (_, plan)), (_, (_, export)) = calls[:2]
    for given in (plan, export):
        assert given["input_layouts"] == "S(0)" and given["output_layouts"] == {"outputs[0]": "R", "outputs[1]": "S(1)"}
    assert plan["time_limit"] == 2.5 and plan["pins"] is None


def test_export_takes_a_plan_or_makes_one(
    model: str, tmp_path: Path, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fxshard import inspect

    monkeypatch.setattr(inspect, "summary", lambda program: "the summary")
    assert cli.main(["export", f"{model}:training", "--mesh", "dp=2,tp=2", "-o", "m.pt2"]) == 0
    assert [name for name, _ in calls] == ["export", "save"] and calls[0][1][1]["plan"] is None
    assert capsys.readouterr().out == "the summary\n\nwrote m.pt2\n"

    calls.clear()
    options = ["--objective", "communication", "--memory-limit", "1GB", "--pin", "a=RR", "--dump", "d"]
    assert cli.main(["export", f"{model}:training", "--mesh", "dp=2,tp=2", *options, "-o", "m.pt2"]) == 0
    given = calls[0][1][1]
    assert [given[k] for k in ("objective", "memory_limit", "pins", "dump")] == ["communication", "1GB", {"a": "RR"}, "d"]

    calls.clear()
    small_plan().save(tmp_path / "plan.json")
    assert cli.main(["export", f"{model}:training", "--mesh", "dp=2,tp=2", "--plan", str(tmp_path / "plan.json"), "-o", "m.pt2"]) == 0
    assert [name for name, _ in calls] == ["export", "save"] and calls[0][1][1]["plan"] == small_plan()


REFUSED: list[tuple[list[str], str]] = [
    (["--mesh", "dp"], "cannot read mesh 'dp'"),
    (["--mesh", "dp=2", "--hardware", "h10"], "unknown hardware 'h10'; did you mean 'h100'?"),
    (["--mesh", "dp=2", "--pin", "0.weight"], "cannot read --pin '0.weight'"),
    (["--mesh", "dp=2", "--pin", "a=R", "--pin", "a=S(0)"], "--pin gives 'a' R and S(0)"),
    (["--mesh", "dp=2", "--memory-limit", "8 apples"], "cannot read '8 apples' as a number of bytes"),
    (["--mesh", "dp=2", "--pin", "nothing=R"], "pin 'nothing' matches"),
    (["--mesh", "dp=2", "--equal", "nothing"], "cannot read --equal 'nothing'"),
    (["--mesh", "dp=2", "--equal", "0.weight=nothing"], "'nothing' matches no"),
    (["--mesh", "dp=2", "--forbid", "0.weight"], "cannot read --forbid '0.weight'"),
    (["--mesh", "dp=2", "--at-most", "dp"], "cannot read --at-most 'dp'"),
    (["--mesh", "dp=2", "--at-most", "dp=lots"], "cannot read 'lots' as a number of bytes"),
    (["--mesh", "dp=2", "--at-most", "tp=1GB"], "the mesh has no axis 'tp'"),
    (["--mesh", "dp=2", "--input-layout", "R", "--input-layout", "a=R"], "cannot read --input-layout 'R'"),
    (["--mesh", "dp=2", "--output-layout", "a=R", "--output-layout", "a=S(0)"], "--output-layout gives 'a' R and S(0)"),
    (["--mesh", "dp=2", "--input-layout", "other=R"], "input_layouts names 'other'"),
    (["--mesh", "dp=2", "--time-limit", "-1"], "cannot read time_limit=-1.0"),
    (["--mesh", "tp=2,tp=2"], "the axis 'tp' occurs twice"),
    (["--mesh", "dp=2", "--dump", "/dev/null/dump"], "cannot make the folder"),
]


@pytest.mark.parametrize(("options", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_a_mistake_of_the_user_is_a_message(model: str, options: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{model}:training", *options]) == 2
    printed = capsys.readouterr()
    assert what in printed.err and "to do:" in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


def test_a_plan_and_pins_contradict(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", f"{model}:training", "--mesh", "dp=2", "--plan", "p.json", "--pin", "a=R", "-o", "m.pt2"]) == 2
    assert "is decided already, so --pin would have no effect" in capsys.readouterr().err
    ends = ["--input-layout", "R", "--output-layout", "R"]
    assert cli.main(["export", f"{model}:training", "--mesh", "dp=2", "--plan", "p.json", *ends, "-o", "m.pt2"]) == 2
    assert "--input-layout and --output-layout would have no effect" in capsys.readouterr().err


def test_export_for_real_returns_whole_outputs_and_refuses_another_mesh(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fxshard

    output, plan = str(tmp_path / "m.pt2"), str(tmp_path / "plan.json")
    assert cli.main(["export", f"{model}:training", "--mesh", "tp=2", "--pin", "0.weight=S(0)", "-o", output]) == 0
    program = fxshard.load(output)
    assert {str(x) for x in program.output_layouts} == {"R"}
    program.plan.save(plan)
    capsys.readouterr()
    assert cli.main(["export", f"{model}:training", "--mesh", "tp=4", "--plan", plan, "-o", output]) == 2
    assert "the plan is for mesh tp=2, not tp=4" in capsys.readouterr().err


def test_a_file_that_is_neither_plan_nor_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("import torch\n", "", "[]"):
        (tmp_path / "model.py").write_text(text)
        assert cli.main(["inspect", str(tmp_path / "model.py")]) == 2
        assert "neither a plan nor a program" in (printed := capsys.readouterr().err)
        assert "a plan (.json)" in printed and "a program (.pt2)" in printed
    assert cli.main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text('\n {"format": "fxshard-plan"')
    assert cli.main(["inspect", str(tmp_path / "plan.json")]) == 2
    assert "cut short" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    model: str, tmp_path: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "export"):
        for output in (tmp_path, tmp_path / "none" / "file"):
            assert cli.main([command, f"{model}:training", "--mesh", "tp=2", "-o", str(output)]) == 2
            assert "cannot write the file" in (printed := capsys.readouterr()).err and printed.out == ""
    assert not calls


def test_a_bug_of_fxshard_asks_for_a_report_below_its_traceback(
    model: str, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fxshard import api

    def fault(*_: Any, **__: Any) -> None:
        raise AssertionError("what cannot be")

    monkeypatch.setattr(api, "plan", fault)
    assert cli.main(["plan", f"{model}:training", "--mesh", "tp=2"]) == 1
    printed = capsys.readouterr().err
    assert "AssertionError: what cannot be" in printed and "in fault" in printed
    assert "please report it" in (last := printed.strip().splitlines()[-1]) and "FXSHARD_DUMP" in last


def test_help_needs_nothing_heavy() -> None:
    """Parsing a command line imports neither torch, which takes seconds, nor anything else but tabulate."""
    ours = "import sys; from fxshard.cli import main; main._parser()"
    said = f"{ours}; print(sorted({{name.partition('.')[0] for name in sys.modules}} - set(sys.stdlib_module_names)))"
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60)
    found = ast.literal_eval(ran.stdout)
    assert [name for name in found if not name.startswith("_")] == ["fxshard", "tabulate"], ran.stderr


WRONG = (
    "plan none.py:training --mesh dp=2",
    "plan none.py --mesh dp=2",
    "plan {0}:training --mesh dp2",
    "plan {0}:training --mesh dp=2 --pin abc",
    "plan {0}:training --mesh dp=2 --hardware h10",
    "plan {0}:training --mesh dp=2 --memory-limit lots",
    "plan {0}:training --mesh dp=2 --at-most dp=lots",
    "plan {0}:training --mesh dp=2 --equal one",
    "plan {0}:training --mesh dp=2 -o none/plan.json",
    "export {0}:training --mesh dp=2 -o none.pt2 --plan none.json",
    "inspect none.json",
    "inspect {0}",
    "diff none.json none.json",
    "calibrate --mesh dp2",
    "calibrate --hardware h100",
    "calibrate --quick --nodes 2",
    "calibrate --gpus-per-node 8",
    *(
        f"calibrate --nccl-tests none.txt --hardware h100 {options}"
        for options in (
            *("--mesh dp=2", "--quick", "--device cuda"),
            *("--nodes 4", "--gpus-per-node 8", "--nodes -2 --gpus-per-node -8", "--nodes 1 --gpus-per-node 1"),
        )
    ),
    "calibrate --trace none.json --hardware h100 --nodes 2",
)


def test_wrong_arguments_are_refused_without_torch(tmp_path: Path) -> None:
    """Each is an error of the user, raised before torch is imported."""
    (tmp_path / "model.py").write_text("import torch")
    lines = [command.format("model.py").split() for command in WRONG]
    code = f"import sys; from fxshard.cli import main as cli; print([(cli.main(line), 'torch' in sys.modules) for line in {lines!r}])"
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    assert ast.literal_eval(done.stdout) == [(USER_ERROR, False)] * len(WRONG), done.stderr
    assert done.stderr.count("to do:") == len(WRONG)


LIBRARY = """
import os, signal
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import register_sharding

@torch.library.custom_op("fxshard_cli::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 4:
        os.kill(os.getpid(), signal.SIGFPE)
    return x * 2

@torch.library.custom_op("fxshard_cli::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True)

@torch.library.custom_op("fxshard_cli::good_rows", mutates_args=())
def good_rows(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True)

register_sharding(torch.ops.fxshard_cli.rows.default)(lambda x: [([Shard(1)], [Shard(1)])])
register_sharding(torch.ops.fxshard_cli.good_rows.default)(lambda x: [([Shard(0)], [Shard(0)])])

def samples():
    return [(torch.randn(6, 5),)]
"""


def _check_op(folder: Path, name: str) -> list[str]:
    (folder / "library.py").write_text(LIBRARY)
    return ["check-op", name, "--sample", str(folder / "library.py:samples")]


def test_a_kernel_that_ends_the_process_is_a_message(tmp_path: Path) -> None:
    """The command forks, which it does not do in a process that has torch already."""
    command = [sys.executable, "-m", "fxshard", *_check_op(tmp_path, "fxshard_cli::fragile")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert "fxshard_cli::fragile was ended by SIGFPE" in done.stderr and "float32[6, 5]" in done.stderr and "--sample" in done.stderr


def test_a_function_of_register_sharding_is_judged_like_a_rule(tmp_path: Path) -> None:
    """In processes of their own, so that no other test sees the operators."""
    code, out, said = run_command(partial(cli.main, _check_op(tmp_path, "fxshard_cli::rows")), tmp_path)
    assert code == 1 and "register_sharding): WRONG" in out, said
    assert "S(1) -> S(1)" in out and "missing:\n  S(0) -> S(0)" in out
    code, out, said = run_command(partial(cli.main, _check_op(tmp_path, "fxshard_cli::good_rows")), tmp_path)
    assert code == 0 and "register_sharding): right and complete" in out, said


def test_a_rule_is_searched_on_torchs_samples_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-op", "aten.special_airy_ai.default", "--samples", "8", "--budget", "50"]) == 0
    said = capsys.readouterr()
    assert 'register_rule("aten::special_airy_ai", "a -> a")' in said.out and "5 with other numbers of dims are left out" in said.out


@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("aten.randint_like.default", "gives other numbers each time"),
        ("aten.normal_.default", "changes its arguments"),
    ],
)
def test_aten_operators_that_cannot_have_a_rule_are_refused(op: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-op", op, "--samples", "3", "--budget", "50"]) == 2
    assert what in capsys.readouterr().err
