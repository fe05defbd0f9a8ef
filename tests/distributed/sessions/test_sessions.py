"""Random sessions on two gloo ranks, against one device in float64: one for each model, by another door each."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.scenarios import cases_on_ranks
from tests.distributed.sessions.doors import session

pytestmark = pytest.mark.distributed

PLAYED = [("fully_shard", "heads"), ("torch's styles", "tied"), ("tp", "shared"), ("backend", "pictures"), ("styles", "recurrent")]
found, test_two_ranks = cases_on_ranks(2, {f"{d} {s}": functools.partial(session, d, s, 0) for d, s in PLAYED})
