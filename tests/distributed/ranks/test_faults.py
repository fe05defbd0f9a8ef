"""If a rank is killed, stalls, raises or ends, every other rank raises in time an error that names the rank and the collective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.faults import TIMEOUT, Fault, start

pytestmark = pytest.mark.distributed
PLACES = {"save": "'save the checkpoint'", "clip": "'take the norm of the gradients'"}
SLACK = 3.0  # seconds, for many processes on two cores

FAULTS = {
    Fault("KILL", 1): "rank 1 gives no sign of life",
    Fault("KILL", 0, during="backward"): "rank 0 gives no sign of life",
    Fault("KILL", 3, mesh=(2, 2)): "rank 3 gives no sign of life",
    Fault("KILL", 1, during="save"): "rank 1 gives no sign of life",
    Fault("KILL", 1, during="clip"): "rank 1 gives no sign of life",
    Fault("STOP", 1): "rank 1 gives no sign of life",
    Fault("loop", 0, mesh=(3,)): "rank 0 did not come, though it is alive",
    Fault("raise", 1, during="backward"): "rank 1 has ended with ValueError: the loader broke",
    Fault("end", 0): "rank 0 has ended",
    Fault("KILL", 1, during="backward", compiler="inductor"): "rank 1 gives no sign of life",
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_survivors_name_the_rank_and_the_collective(fault: Fault, tmp_path: Path) -> None:
    met = start(fault, tmp_path)
    survivors = set(range(fault.world)) - {fault.rank}
    assert survivors <= set(met), f"of ranks {survivors} only {set(met)} ended by themselves"
    for rank in survivors:
        found = met[rank]
        assert (found.kind, FAULTS[fault] in found.text) == ("RunError", True), found
        place = PLACES.get(fault.during) or rf"all_\w+ of '\w+' over \w+ \(.* of the {fault.during} of program"
        assert re.search(f"rank {rank} was in {place}", found.text), found.text
        assert found.seconds < TIMEOUT + SLACK, found
