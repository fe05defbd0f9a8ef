"""Sums over time, against adding up at each time."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fxshard.solver import Timeline

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 100)))


@given(SPANS)
@example([(3, 5, 0)])  # no sum above 0, at a time that is not 0
def test_sums_and_peak(given_: list[tuple[int, int, int]]) -> None:
    found = [(min(a, b), max(a, b), amount) for a, b, amount in given_]
    timeline = Timeline.of([(lo, hi) for lo, hi, _ in found], [amount for *_, amount in found])
    sums = [sum(amount for lo, hi, amount in found if lo <= t < hi) for t in range(-1, 12)]
    assert timeline.at(range(-1, 12)).tolist() == sums
    assert timeline.peak() == ((np.argmax(sums) - 1, max(sums)) if max(sums) > 0 else (0, 0))
