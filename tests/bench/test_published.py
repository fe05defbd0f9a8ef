"""The bench of published measurements: its rows, devices, layouts and exit status, on files written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.published import fit, rows, sustained
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
    (one,) = rows.collectives(written(tmp_path, 1.0) / "collectives.csv")
    again = rows.Collective(one.kind, one.device, one.ranks, one.nodes, one.size, one.measured, "PyTorch")
    assert predicted(again) > predicted(one) + 20


def test_a_fit_knows_nothing_of_a_source_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One source alone has several nodes: without it, what holds between nodes is NCCL's, and is said to be unknown."""
    true = {**fit.NEUTRAL, "network": 0.8, "nvls_tree": 40.0, "fill": 0.7}
    monkeypatch.setattr(fit, "STARTS", fit.STARTS[:1])
    blank = [rows.Collective("all_reduce", "b200", 32, 4, 2**k, 1.0, "PyTorch") for k in (22, 25, 28)]
    blank += [rows.Collective("all_reduce", "h200", 8, 1, 2**k, 1.0, "nccl-tests") for k in (20, 24, 30)]
    made = [replace(one, measured=fit.time_with(one, true)) for one in blank]
    found = fit.left_out(made)
    constants, unknown, ratios = found["b200, PyTorch"]
    assert constants["network"] == 1.0 and constants["nvls_tree"] == 14.0 and {"network", "nvls_tree"} <= set(unknown)
    assert min(ratios) < 0.9
    assert "network" not in found["h200, nccl-tests"][1]


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


def test_the_rate_that_products_sustain_is_recovered_without_a_source() -> None:
    """Steps made with products at 0.5 of the best rate, of two sources: either one gives that rate, which predicts the other."""
    held = []
    for source, products in (("one", 9e5), ("one", 4e5), ("two", 2e5)):
        time = StepTime(products, 1e5, 2e5, 3e4, 5e4, 1e4, again=4e4)
        true = time.total + (products + 4e4) * (sustained.SUSTAINED / 0.5 - 1)
        step = rows.Step("llama3-8b", "h100", "dp=8", "FSDP", 1, 8192, "none", true / 1000, f"{source} paper")
        held.append(sustained.Held(step, time))
    assert sustained.fitted(held) == 0.5
    for rate, own in sustained.left_out(held).values():
        assert rate == 0.5 and sustained.spread(own, rate) == pytest.approx((1.0, 1.0, 1.0))
