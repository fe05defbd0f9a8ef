"""Random sessions on two gloo ranks, against one device in float64: ten for each model and door."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.scenarios import cases_on_ranks
from tests.distributed.sessions.doors import EVERY, session

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SEEDS = range(1, 11)
found, test_two_ranks = cases_on_ranks(
    2, {f"{d} {s} {seed}": functools.partial(session, d, s, seed) for seed in SEEDS for d, s in EVERY}, seconds=36_000.0
)
