"""The bench of published measurements: its rows, devices, layouts and exit status, on files written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.published import rows
from bench.published.__main__ import main
from bench.published.collective_time import predicted
from bench.published.layouts import pins_of
from bench.published.step_time import StepTime, _planned
from fxshard.mesh.hardware import HARDWARE

COLLECTIVES = "kind,device,ranks,nodes,bytes,measured_us,source\nall_reduce,h200,8,1,67108864,{time},nccl-tests 2.30.7 (ml-engineering)\n"


def written(folder: Path, measured: float) -> Path:
    (folder / "collectives.csv").write_text(COLLECTIVES.format(time=measured))
    (folder / "steps.csv").write_text("model\n")
    return folder


@pytest.mark.parametrize(("measured", "status", "said"), [(317.6, 0, "0 outside"), (150.0, 1, "1 outside")])
def test_a_row_outside_its_bounds_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: float, status: int, said: str
) -> None:
    """64 MiB on 8 H200 were measured at 317.6 us."""
    assert main(["--data", str(written(tmp_path, measured)), "collectives"]) == status
    assert said in capsys.readouterr().out


def test_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXSHARD_DATA", raising=False)
    assert main([]) == 2


def test_a_single_call_takes_longer_than_one_of_many(tmp_path: Path) -> None:
    (one,) = rows.collectives(written(tmp_path, 1.0))
    again = rows.Collective(one.kind, one.device, one.ranks, one.nodes, one.size, one.measured, "PyTorch")
    assert predicted(again) > predicted(one) + 20


def test_devices_with_a_limit_of_power_and_another_memory() -> None:
    limited, plain = rows.hardware_of("h100-350W-2.4TB/s"), HARDWARE["h100"]
    assert limited.flops[2] == pytest.approx(plain.flops[2] / 2 ** (1 / 3)) and limited.memory_bandwidth == 2.4e12
    assert rows.hardware_of("h100") == plain and limited.name != plain.name
    with pytest.raises(ValueError, match="no preset"):
        rows.hardware_of("mi300x")


def test_a_layout_that_no_run_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no layout 'DP x TP' for mpt-7b"):
        pins_of("DP x TP", None, "mpt-7b")  # type: ignore[arg-type]


def test_the_parts_of_a_step_grow_with_its_layers() -> None:
    step = rows.Step("mpt-1b", "h100", "dp=8", "FSDP", 1, 1024, "none", 1.0, "")
    one, two = (_planned(step, layers) for layers in (1, 2))
    assert isinstance(one, StepTime) and one.total < two.total < 2 * one.total
    assert one.products < two.products and one.attention * 2 == pytest.approx(two.attention)
    assert one.recomputed == 0 and 0 < one.optimizer < two.optimizer
