"""A run that is killed and restarted ends with the same state; a state that was not restored is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import fxshard
from bench.kills.rank import Settings, model
from bench.kills.supervisor import differing, run
from tests.distributed.scenarios import forks

SETTINGS = Settings(steps=40, compiler="eager", small=True)


@pytest.mark.distributed
def test_a_killed_run_ends_with_the_same_checkpoint(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed of the kills: {seed}")
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    forks()
    killed.mkdir()
    assert run(SETTINGS, calm, 0, seed).steps_done == SETTINGS.steps
    said = run(SETTINGS, killed, 3, seed)
    assert (said.starts, len(said.killed_at)) == (4, 3), f"every kill must come before the end, seed {seed}"
    assert not differing(calm / "checkpoint", killed / "checkpoint"), f"seed {seed}: {said}"


def test_every_difference_is_found(tmp_path: Path) -> None:
    """A small change of one weight, the position in the data, the random state."""
    for name, seed, step, change in (("a", 0, 1, 0.0), ("same", 0, 1, 0.0), ("bit", 0, 1, 1e-7), ("step", 0, 2, 0.0), ("draw", 1, 1, 0.0)):
        made = model(small=True)
        with torch.no_grad():
            made.out.bias[0] += change
        torch.manual_seed(seed)
        fxshard.save_checkpoint(tmp_path / name, made, extra={"step": step})
    found = {name: differing(tmp_path / "a", tmp_path / name) for name in ("same", "bit", "step", "draw")}
    assert found == {"same": [], "bit": ["out.bias"], "step": ["values"], "draw": ["random/0/cpu"]}
