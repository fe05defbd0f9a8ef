"""Once a model is parallelized, gloo's network threads have the batch scheduling policy, in all groups; no other thread has."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.runtime.groups import gloo_threads
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies of threads are Linux's")


def policies() -> Counter[tuple[bool, int]]:
    """Counts (is a network thread, scheduling policy) over all threads of this process, read from /proc."""
    found = Counter[tuple[bool, int]]()
    for folder in Path("/proc/self/task").iterdir():
        try:
            found[b"tcp_loop" in (folder / "comm").read_bytes(), os.sched_getscheduler(int(folder.name))] += 1
        except OSError:  # the thread has ended
            continue
    return found


def parallelized() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    time.sleep(1)  # a thread sets its own name after it starts
    before = policies()
    threads = before[True, os.SCHED_OTHER]
    assert threads and not before[True, os.SCHED_BATCH], "gloo's threads have this name, and start with the usual policy"
    model = fxshard.parallelize(nn.Linear(4, 4), (torch.ones(2, 4),), mesh, compiler="eager")
    after = policies()
    assert after[True, os.SCHED_BATCH] == threads and not after[True, os.SCHED_OTHER], (before, after)
    assert not after[False, os.SCHED_BATCH], (before, after)
    assert torch.isfinite(model(torch.ones(2, 4))).all()
    assert gloo_threads.set_policy(gloo_threads.USUAL) == threads and policies()[True, os.SCHED_OTHER] == threads


@pytest.mark.distributed
def test_batch_threads_from_the_first_model_on(tmp_path: Path) -> None:
    said = run_scenarios({"parallelized": parallelized}, 2, tmp_path)
    assert said == {"parallelized": ""}, said["parallelized"]


@pytest.mark.parametrize(
    ("error", "counted"), [(ProcessLookupError(), 0), (PermissionError(), 0), (OSError(errno.EINVAL, "Invalid argument"), 0), (None, 1)]
)
def test_a_thread_that_cannot_be_scheduled(
    error: OSError | None, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that ended is ignored. If the system forbids the change, a log line says what that costs."""
    own = os.getpid()  # stands for a network thread
    for number, name in ((1, b"cut in an umlaut\xc3"), (own, gloo_threads.NAME)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_bytes(name + b"\n")
    (tmp_path / "2").mkdir()  # it ended before its name was read
    asked = []

    def refuse(thread: int, policy: int, parameters: object) -> None:
        asked.append((thread, policy))
        if error is not None:
            raise error

    monkeypatch.setattr(gloo_threads, "THREADS", tmp_path)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with caplog.at_level("INFO", "fxshard"):
        assert gloo_threads.set_policy() == counted
    assert asked == [(own, os.SCHED_BATCH)]
    assert ("gloo's threads keep their scheduling policy" in caplog.text) == (counted == 0 and not isinstance(error, ProcessLookupError))


def test_a_policy_that_someone_else_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "comm").write_bytes(gloo_threads.NAME)
    monkeypatch.setattr(gloo_threads, "THREADS", tmp_path)
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *given: pytest.fail("a policy that someone else chose was changed"))
    assert gloo_threads.set_policy() == 0
