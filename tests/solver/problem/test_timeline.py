"""Sums over time, against adding up at each time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxshard.solver import Timeline

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 100)))


@given(SPANS)
def test_sums_and_peak(given_: list[tuple[int, int, int]]) -> None:
    found = [(min(a, b), max(a, b), amount) for a, b, amount in given_]
    timeline = Timeline.of([(lo, hi) for lo, hi, _ in found], [amount for *_, amount in found])
    sums = [sum(amount for lo, hi, amount in found if lo <= t < hi) for t in range(-1, 12)]
    assert timeline.at(range(-1, 12)).tolist() == sums
    time, most = timeline.peak()
    assert most == max(sums) and (most == 0 or time == np.argmax(sums) - 1)
