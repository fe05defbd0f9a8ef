"""Short real measurements: on this device alone, and on two gloo ranks that the command starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.cli import main as cli
from fxshard.cost import collective_time
from fxshard.errors import RunError
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import COLLECTIVES, sent_bytes, single_step
from fxshard.mesh.hardware_file import load
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.runtime.measure import calibrate, measure

TINY = measure.Effort(rounds=25, batch=50.0, product=256, copy=20, buffer=14)
QUICKER = """
import sys
from fxshard.cli.main import main
from fxshard.runtime.measure import measure
measure.EFFORTS["cpu", True] = measure.Effort(rounds=21, batch=50.0, product=256, copy=20, buffer=20)
measure.PRODUCTS_TIME = 1000.0
sys.exit(main(sys.argv[1:]))
"""
"""The command ``fxshard`` with less effort than ``--quick``."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.EFFORTS, ("cpu", True), TINY)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_one_device(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a mesh the device is measured and links come from a preset, which the output says; a mesh accepts the file."""
    path = tmp_path / "hardware.json"
    assert cli.main(["calibrate", "--quick", "--device", "cpu", "-o", str(path)]) == 0
    printed = capsys.readouterr()
    assert all(text in printed.out for text in ("links: not measured", "the preset cpu", "product, float32", "gelu", "attention"))
    assert printed.err == ""
    found = load(path)
    assert set(found.flops) == {2, 4, 8} and set(found.measured.products) == {"float32", "bfloat16", "float64"}
    assert found.launch > 0 and found.memory_bandwidth > 0 and not found.measured.collectives
    assert Mesh({"tp": 2}, path).hardware == found


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, whose ranks measure little: one report and one file, whose curves give the cost of collectives on that mesh."""
    path = tmp_path / "hardware.json"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    real = subprocess.Popen

    def quicker(command: list[str], env: dict[str, str]) -> Any:
        assert command[1:3] == ["-m", "fxshard"]
        return real([command[0], "-c", QUICKER, *command[3:]], env=env)

    monkeypatch.setattr(calibrate.subprocess, "Popen", quicker)
    for _ in range(3):
        ended = cli.main(["calibrate", "--mesh", "tp=2", "--quick", "--device", "cpu", "-o", str(path)])
        printed = capfd.readouterr()
        if "measure again on a less busy machine" not in printed.err:
            break
    assert ended == 0, printed.err
    assert printed.out.count("prediction against measurement") == 1 and printed.out.count("wrote ") == 1
    for kind in COLLECTIVES:
        assert printed.out.count(f"{kind} on tp") == 2, "one line by the curves, one by the links"
    found = load(path)
    hidden = set(re.findall(r"more bytes took (\w+) on tp no longer", printed.err))  # by other work on this machine
    assert set(found.measured.collectives) == {(kind, 2, 1) for kind in COLLECTIVES if kind not in hidden} and found.between is None
    for (kind, _, _), curve in found.measured.collectives.items():
        size, time = curve.points[-1]
        assert collective_time(kind, 0, size, parse_mesh("any=2", str(path))) == pytest.approx(time)


def test_bytes_of_a_measured_collective_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 24 x 6 floats on three ranks: with each kind of collective, a rank sends the predicted bytes."""

    class Fake:
        def size(self, axis: int) -> int:
            return 3

        def get_group(self, axis: int) -> object:
            return type("Group", (), {"group_name": "none"})

    monkeypatch.setattr(measure, "backend_name", lambda group, device: "gloo")
    steps = {"all_reduce": "P R", "all_gather": "S(0) R", "reduce_scatter": "P S(0)", "all_to_all": "S(0) S(1)"}
    mesh = Mesh({"tp": 3})
    for kind, ends in steps.items():
        source, target = (Layout.parse(end) for end in ends.split())
        step, shape = single_step(0, source[0], target[0]), (24, 6)
        assert step is not None and step.kind == kind
        buffer = 24 * 6 * 4 // (3 if kind == "all_to_all" else 1)  # a rank's shard is what an all-to-all exchanges
        _, sent = measure._collective(kind, buffer, Fake(), 0, torch.ones(200))  # type: ignore[arg-type]  # of a DeviceMesh it needs two methods
        assert sent == sent_bytes(step, source, shape, 4, mesh)


class Noisy(measure.Clock):
    """A clock on a busy machine: in rounds with noise the products alone take longer than products and collectives together."""

    def __init__(self, noise: list[float]) -> None:
        super().__init__(torch.device("cpu"), TINY)
        self.noise = iter(noise)
        self.asked = 0

    def some_rounds(self, works: Sequence[measure.Work], count: int) -> list[list[float]]:
        self.asked += 1
        return [[4000.0 + next(self.noise), *(4100.0 + 10 * i for i in range(len(works) - 1))] for _ in range(3)]


def test_times_hidden_by_noise_are_measured_again() -> None:
    """The result is the median of all rounds, here of six quiet ones and three noisy ones."""
    noisy = Noisy([500.0] * 3 + [0.0] * 9)
    assert measure._times_beyond(noisy, lambda: None, [lambda: None] * 3, 3) == [100.0, 110.0, 120.0] and noisy.asked == 3
    quiet = Noisy([0.0] * 3)
    assert measure._times_beyond(quiet, lambda: None, [lambda: None] * 2, 2) == [100.0, 110.0] and quiet.asked == 1
    hopeless = Noisy([500.0] * 100)
    assert (
        measure._times_beyond(hopeless, lambda: None, [lambda: None] * 2, 2) == [measure.MIN_TIME] * 2
        and hopeless.asked == measure.ATTEMPTS
    )


def test_a_collective_that_takes_no_longer_for_more_bytes_is_measured_again() -> None:
    """Two collectives at two sizes each: in the first three of nine rounds, noise makes the second one's smaller size the slower."""
    disturbed = [[4000.0, 4100.0, 4110.0, 4500.0, 4200.0]] * 3
    as_they_are = [[4000.0, 4100.0, 4110.0, 4150.0, 4200.0]] * 6

    class Disturbed(Noisy):
        def some_rounds(self, works: Sequence[measure.Work], count: int) -> list[list[float]]:
            self.asked += 1
            return disturbed if self.asked == 1 else as_they_are

    clock = Disturbed([])
    assert measure._times_beyond(clock, lambda: None, [lambda: None] * 4, 2) == [100.0, 110.0, 150.0, 200.0] and clock.asked == 2


def test_mistakes_of_the_user(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mistakes = [
        (["--mesh", "tp"], "cannot read mesh 'tp'"),
        (["-o", str(tmp_path / "no" / "h.json")], "cannot write the file"),
        *([(["--device", "cuda"], "there is no CUDA device here")] if not torch.cuda.is_available() else []),
    ]
    for options, what in mistakes:
        assert cli.main(["calibrate", "--quick", *options]) == 2
        assert what in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["calibrate", "--quick", "--device", "cpu", "--mesh", "tp=2"]) == 2
    assert "mesh 'tp=2' has 2 ranks, and 4 are running" in capsys.readouterr().err


def test_a_rank_that_fails_is_named() -> None:
    """Both ranks get an option that the command does not know."""
    with pytest.raises(RunError, match=r"rank [01] failed"):
        calibrate.start_ranks(Mesh({"tp": 2}), "cpu", ["calibrate", "--nonsense"])
