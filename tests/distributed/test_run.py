"""``torchrun -m fxshard run``: an exported program on two gloo ranks, with its weights inside or in a file per rank, or planned again; a
training step, which writes the updated weights."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from fxshard.cli import main as cli
from fxshard.ops.random import draw
from tests.cli import test_run_training
from tests.cli.test_run import exported, same
from tests.distributed.fresh import ROOT
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed
TWO = ("--mesh", "dp=1,tp=2")


def launched(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """``fxshard run`` on two ranks of torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fxshard", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launch, *given, "--compiler", "eager"], env=environment, capture_output=True, text=True, timeout=300, cwd=folder
    )


def both_steps(told: str, program: Path, trace: Path) -> None:
    """The measured collectives are those of the program, each on the lane of its axis, and the rank waits for each; the table says both."""
    wanted = fxshard.load(program)
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    measured = [(lanes[1, e["tid"]], e["name"]) for e in events if e["ph"] == "X" and e["pid"] == 1]
    lanes_of_collectives = [lane for lane, name in measured if name.startswith("gloo:")]
    assert sorted(lanes_of_collectives) == sorted(f"axis {c.axis}" for c in wanted.collectives) != []
    assert sum("wait_tensor" in name for _, name in measured) == len(wanted.collectives)
    assert any(e["pid"] == 0 and e["ph"] == "X" and e["ts"] == 0 for e in events), "the predicted step begins at 0"
    assert all(e["ts"] >= 0 for e in events if e["ph"] == "X")
    assert "collectives on tp: waited for" in told and f"wrote {trace}" in told


def test_an_error_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    ran = launched(tmp_path, "missing.pt2", "--inputs", "in.safetensors")
    assert ran.returncode != 0
    assert ran.stderr.count("where: missing.pt2") == 1, ran.stderr


def command(folder: Path, weights: str, *more: str) -> list[str]:
    """Arguments of ``fxshard run`` for the program of ``exported``, on its inputs."""
    return [str(folder / f"{weights}.pt2"), "--inputs", str(folder / "in.safetensors"), "-o", str(folder / "out.safetensors"), *more]


def on_this_rank(weights: str, more: tuple[str, ...], folder: Path) -> None:
    """Runs the command in a rank, whose store takes the place of the one that torchrun's agent holds; its output goes to a file."""
    rank = str(dist.get_rank())
    dist.destroy_process_group()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": (folder / "port").read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (folder / f"said{rank}").open("w") as out, contextlib.redirect_stdout(out):
        assert cli.main(["run", *command(folder, weights, "--compiler", "eager", *more)]) == 0


def check(folder: Path, said: str) -> None:
    assert said.count("outputs['logits']: [4, 8]") == 1, "one rank prints"
    same(folder)


def test_torchrun(tmp_path: Path) -> None:
    program, trace = exported(tmp_path, "inside", *TWO), tmp_path / "trace.json"
    assert not list(tmp_path.glob("*.rank-*"))
    ran = launched(tmp_path, *command(tmp_path, "inside", "--profile", str(trace)))
    assert ran.returncode == 0, ran.stderr[-3000:]
    check(tmp_path, ran.stdout)
    both_steps(ran.stdout, program, trace)


@pytest.mark.parametrize(
    ("weights", "exports", "runs", "files"),
    [("per-rank", TWO, (), 2), ("inside", ("--replan",), TWO, 0)],
    ids=["a file per rank", "planned again"],
)
def test_two_ranks(weights: str, exports: tuple[str, ...], runs: tuple[str, ...], files: int, tmp_path: Path) -> None:
    """The ranks are forks of a process with torch, which torchrun would import three times."""
    exported(tmp_path, weights, *exports)
    assert len(list(tmp_path.glob("*.rank-*"))) == files
    said = run_scenarios({"run": functools.partial(on_this_rank, weights, runs, tmp_path)}, 2, tmp_path)
    assert not said["run"], said["run"]
    check(tmp_path, "".join((tmp_path / f"said{rank}").read_text() for rank in range(2)))


def test_a_profile_of_inductors_code(tmp_path: Path) -> None:
    program, trace = exported(tmp_path, "inside", *TWO), tmp_path / "trace.json"
    more = ("--compiler", "inductor", "--profile", str(trace))
    said = run_scenarios({"run": functools.partial(on_this_rank, "inside", more, tmp_path)}, 2, tmp_path)
    assert not said["run"], said["run"]
    both_steps("".join((tmp_path / f"said{rank}").read_text() for rank in range(2)), program, trace)


def with_a_seed_of_its_own(folder: Path) -> None:
    torch.manual_seed(dist.get_rank() + 5)
    on_this_rank("inside", (), folder)


def test_random_numbers_are_those_of_one_device(tmp_path: Path) -> None:
    program = fxshard.export(nn.Dropout(0.5), (torch.ones(6, 8),), fxshard.Mesh({"tp": 2}), input_layouts="S(0)")
    program.save(tmp_path / "inside.pt2")
    save_file({"args[0]": torch.ones(6, 8)}, tmp_path / "in.safetensors")
    said = run_scenarios({"run": functools.partial(with_a_seed_of_its_own, tmp_path)}, 2, tmp_path)
    assert not said["run"], said["run"]
    torch.manual_seed(0)
    mask = draw("kept", 0.5, 0, [6, 8], torch.bool, torch.randint(0, 2**62, (), dtype=torch.int64), 0)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["outputs"], mask * 2.0)


def test_a_training_step(tmp_path: Path) -> None:
    """The first step on two ranks, the second one, from the weights that they wrote, simulated."""
    test_run_training.exported(tmp_path, "tp=2", "--optimizer", test_run_training.OPTIMIZER)
    ran = launched(tmp_path, *test_run_training.arguments(tmp_path, 0)[1:])
    assert ran.stdout.count("wrote") == 2, ran.stderr[-3000:]
    assert cli.main([*test_run_training.arguments(tmp_path, 1), "--simulate"]) == 0
    test_run_training.same(tmp_path)
