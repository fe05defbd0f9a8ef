"""The errors within which prices are drawn: one for all, those that a preset states, or one by family of prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxshard.errors import OptionError
from fxshard.mesh.hardware import HARDWARE
from fxshard.mesh.price_draws import FAMILIES, STATED_ERRORS, drawn, errors_of


def test_only_the_families_that_are_named_are_wrong() -> None:
    h = HARDWARE["h100"]
    for seed in range(10):
        other = drawn(h, {"between": 0.8}, seed)
        assert h.between is not None and other.between is not None
        assert other.between != h.between and 1 / 1.8 <= other.between.bandwidth / h.between.bandwidth <= 1.8
        assert replace(other, between=h.between, measured=h.measured) == h
        assert all(one.latency == one.bandwidth == 1.0 for one in other.measured.efficiency.values())


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_each_preset_states_the_error_of_every_family(name: str) -> None:
    stated = errors_of("stated", HARDWARE[name])
    assert set(stated) == set(FAMILIES) and stated["arithmetic"] == 0.12
    assert stated["between"] == STATED_ERRORS[HARDWARE[name].architecture]["between"]
    assert drawn(HARDWARE[name], "stated", 3) == drawn(HARDWARE[name], stated, 3)


def test_refused() -> None:
    with pytest.raises(OptionError, match="states no errors"):
        errors_of("stated", HARDWARE["cpu"])
    with pytest.raises(OptionError, match="unknown family of prices 'betwen'"):
        errors_of({"betwen": 0.3}, HARDWARE["cpu"])
    for wrong in (0.0, 11.0, -0.5, {"memory": 0.0}, True, {"memory": True}):
        with pytest.raises(OptionError):
            errors_of(wrong, HARDWARE["cpu"])
