"""The regret of a plan under wrong prices: against the best plan of each draw, found by planning from the start on the drawn hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import OptionError
from fxshard.mesh.hardware import HARDWARE
from fxshard.mesh.price_draws import drawn

DRAWS = 4


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))


def planned(model: nn.Module, hardware: object, batch: int = 4096, **options: object) -> fxshard.ShardingPlan:
    mesh = fxshard.Mesh({"dp": 2, "tp": 2}, hardware)  # type: ignore[arg-type]
    return fxshard.plan(model, (torch.randn(batch, 256),), mesh, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_losses_are_those_of_plans_made_on_the_drawn_hardware(model: nn.Module, name: str) -> None:
    plan = planned(model, name)
    found = plan.regret(error=2.0, draws=DRAWS)
    best = [planned(model, drawn(HARDWARE[name], 2.0, seed)) for seed in range(DRAWS)]
    same = [planned(model, drawn(HARDWARE[name], 2.0, seed), pins=plan) for seed in range(DRAWS)]
    expected = sorted(mine.objective / other.objective - 1 for mine, other in zip(same, best, strict=True))
    assert found.losses == pytest.approx(expected, abs=1e-6)
    assert all(low <= high + 1e-9 for low, high in zip(found.losses, found.bounds, strict=True))
    assert found.most == max(found.losses) and f"{DRAWS} draws" in str(found)
    assert plan.regret(error=2.0, draws=DRAWS) == found, "the draws are the same each time"


def test_what_is_on_the_host_has_the_drawn_price_of_its_copies(model: nn.Module) -> None:
    free = planned(model, "h100", 16, optimizer="adamw")
    options = {"batch": 16, "optimizer": "adamw", "offload": True, "memory_limit": sum(free.memory.values()) // 4}
    plan = planned(model, "h100", **options)
    assert plan.offloaded
    hardware = drawn(HARDWARE["h100"], 2.0, 0)
    best, same = planned(model, hardware, **options), planned(model, hardware, pins=plan, **options)
    assert same.on_host == plan.on_host
    assert plan.regret(error=2.0, draws=1).losses == pytest.approx([same.objective / best.objective - 1], abs=1e-6)


def test_drawn_prices_are_within_the_error() -> None:
    h = HARDWARE["h100"]
    assert h.host is not None and len({drawn(h, 0.3, seed).host for seed in range(20)}) == 20
    for seed in range(20):
        other = drawn(h, 0.3, seed)
        for mine, theirs in (
            (h.flops[2], other.flops[2]),
            (h.memory_bandwidth, other.memory_bandwidth),
            (h.launch, other.launch),
            (h.host, other.host),
        ):
            mine, theirs = (getattr(x, "bandwidth", x) for x in (mine, theirs))
            assert 1 / 1.3 <= theirs / mine <= 1.3
        assert all(1 / 1.3 <= e.latency <= 1.3 and 1 / 1.3 <= e.bandwidth <= 1.3 for e in other.measured.efficiency.values())


def test_refused(model: nn.Module) -> None:
    plan = planned(model, "cpu")
    wrong: Any
    for wrong in (0, 2.5, "3", True):
        with pytest.raises(OptionError, match=f"cannot draw {wrong!r} times"):
            plan.regret(draws=wrong)
    with pytest.raises(OptionError, match="minimises bytes"):
        planned(model, "cpu", objective="communication").regret()
