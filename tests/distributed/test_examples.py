"""The examples, run as a user runs them: on two ranks, or in one process; they compare themselves with one device.

Those that start torchrun, which imports torch three times, are slow tests; test_run.py starts it in the suite.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
QUICK = ("--compiler", "eager")


def said(*arguments: str | Path) -> str:
    """What Python prints when it is started with ``arguments``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def forked(script: str, folder: Path, *arguments: str, world: int) -> str:
    """What an example prints on ``world`` ranks. Like torchrun's they have WORLD_SIZE, but they are forks of a process with torch."""
    ran = run_scenarios({script: functools.partial(example, script, arguments, str(folder))}, world, folder)
    assert not ran[script], ran[script]
    return "".join((folder / f"said{rank}").read_text() for rank in range(world))


def example(script: str, arguments: tuple[str, ...], folder: str) -> None:
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    sys.argv, sys.path[:0] = [script, *arguments], [str(EXAMPLES)]  # as Python does when it starts a script
    with Path(folder, f"said{dist.get_rank()}").open("w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def falling_losses(text: str) -> None:
    """The losses of both ranks fall, and are those of one device."""
    (first, last), alone = re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)
    assert float(last) < 0.95 * float(first)
    assert [float(x) for x in alone] == pytest.approx([float(first), float(last)], abs=1e-4)
    difference = re.search(r"greatest difference of the losses: (\S+)", text)
    assert difference is not None and float(difference[1]) < 1e-4


def trains_gpt2(text: str) -> None:
    falling_losses(text)
    assert re.search(r"[1-9]\d* collectives a step, gap 0.0%", text) and text.count("tokens/s") == 2


def test_train_gpt2(tmp_path: Path) -> None:
    trains_gpt2(forked("train_gpt2.py", tmp_path, *QUICK, "--layers", "1", "--steps", "5", world=2))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["auto", "ddp", "fsdp", "tp"])
def test_train_gpt2_under_torchrun(parallel: str) -> None:
    trains_gpt2(said(*TORCHRUN, EXAMPLES / "train_gpt2.py", *QUICK, "--layers", "1", "--steps", "5", "--parallel", parallel))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["finetune_vit_lora", "train_experts"])
def test_training(script: str) -> None:
    text = said(*TORCHRUN, EXAMPLES / f"{script}.py", *QUICK, "--steps", "4")
    falling_losses(text)
    assert ("29,962 of 322,186 parameters are trained" if script == "finetune_vit_lora" else "(8, 128, 64), (Shard(dim=0),)") in text


def test_serve_llama(tmp_path: Path) -> None:
    text = forked("serve_llama.py", tmp_path, *QUICK, "--layers", "1", "--tokens", "4", world=2)
    assert "the tokens are one device's" in text
    assert len(set(re.findall(r"tokens/s, (\[.*?\])", text))) == 1 and text.count("tokens/s") == 3


def test_own_operator(tmp_path: Path) -> None:
    text = forked("own_operator.py", tmp_path, "--plans", "2", world=1)
    assert "swiglu would run whole on every rank: no rule for own.swiglu.default" in text
    assert "with rules: 0 nodes run whole" in text and "2 random plans on 4 ranks compute what one device computes" in text


def test_plan_70b(tmp_path: Path) -> None:
    """Two of the 80 layers: the command of the docs."""
    plan = str(tmp_path / "plan.json")
    text = forked("plan_70b.py", tmp_path, "--layers", "2", "--mesh", "dp=4,tp=2", "-o", plan, world=1)
    assert "proven optimal (gap 0)" in text and (tmp_path / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_gpt2", "finetune_vit_lora", "train_experts", "serve_llama"])
def test_with_default_options(script: str) -> None:
    """Compiled by Inductor."""
    text = said(*TORCHRUN, EXAMPLES / f"{script}.py")
    assert "the tokens are one device's" in text or falling_losses(text) is None


@pytest.mark.slow
def test_the_files_of_getting_started(tmp_path: Path) -> None:
    """The two files that the page shows, saved under the names in their first lines, print the shapes that it shows."""
    page = (ROOT / "docs" / "getting-started.md").read_text()
    blocks = re.findall(r"```python\n(# (\w+\.py).*?)```", page, flags=re.S)
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    assert [name for _, name in blocks] == ["train.py", "simulate.py"]
    shown = re.findall(r"(?:rank 0|the rank at dp=3, tp=1) holds \([\d, ]+\) of \([\d, ]+\)", page)
    trained, simulated = said(*TORCHRUN, tmp_path / "train.py"), said(tmp_path / "simulate.py")
    assert [text in (trained if text.startswith("rank 0") else simulated) for text in shown] == [True, True]
