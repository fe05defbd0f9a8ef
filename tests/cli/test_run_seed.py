"""The random numbers of ``fxshard run``: one seed on all ranks, the one that is given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from fxshard.cli import main as cli
from fxshard.cli import run
from fxshard.ops.random import draw


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    program = fxshard.export(nn.Dropout(0.5), (torch.ones(6, 8),), fxshard.Mesh({"tp": 2}), input_layouts="S(0)")
    program.save(tmp_path / "program.pt2")
    save_file({"args[0]": torch.ones(6, 8)}, tmp_path / "in.safetensors")
    return [str(tmp_path / "program.pt2"), "--inputs", str(tmp_path / "in.safetensors")]


@pytest.mark.parametrize("given", [(), ("--seed", "3")])
def test_simulated(files: list[str], given: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(99)
    assert cli.main(["run", *files, "-o", str(tmp_path / "out"), "--simulate", *given]) == 0
    torch.manual_seed(int(given[1]) if given else 0)
    mask = draw("kept", 0.5, 0, [6, 8], torch.bool, torch.randint(0, 2**62, (), dtype=torch.int64), 0)
    assert torch.equal(load_file(tmp_path / "out")["outputs"], mask * 2.0)


def test_on_ranks_the_seed_is_set_before_any_number_is_drawn(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(program: Any, mesh: Any, args: Any, kwargs: Any, weights: Any, options: argparse.Namespace) -> None:
        seeds.append(torch.initial_seed())

    seeds: list[int] = []
    monkeypatch.setattr(run, "on_ranks", on_ranks)
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch.manual_seed(99)
    assert cli.main(["run", *files, "--seed", "7"]) == 0
    assert seeds == [7]


@pytest.mark.parametrize("seed", ["-1", "x", str(2**63), "1" + "0" * 5000, "1.5"])
def test_what_is_no_seed(files: list[str], seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *files, "--simulate", f"--seed={seed}"])
    assert ended.value.code == 2 and "is not a whole number from 0 to 2^63 - 1" in capsys.readouterr().err


def test_the_number_of_ranks_is_named(files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["run", *files]) == 2
    assert "--nproc-per-node 2 " in capsys.readouterr().err
    assert cli.main(["run", *files, "--mesh", "dp=2,tp=3"]) == 2
    assert "--nproc-per-node 6 " in capsys.readouterr().err
