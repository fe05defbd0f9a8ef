"""Runs entries in separate processes with a time limit, so that a crash or a hang is a verdict and does not end the run."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

Job = Callable[[str], dict[str, Any]]
RENEW = 60
"""Entries after which a process is replaced, so that memory does not grow."""


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    key: str | None = None
    since: float = 0.0
    served: int = 0


def run_all(keys: Sequence[str], job: Job, setup: Callable[[], None], workers: int, limit: float) -> Iterator[tuple[str, Any]]:
    """Yields (key, record) as they finish; the record is "crash" if the process died, "time" if it was stopped."""
    todo = list(reversed(keys))
    pool = [_start(job, setup) for _ in range(min(workers, len(keys)))]
    try:
        while todo or any(w.key for w in pool):
            for i, worker in enumerate(pool):
                if worker.key is None and todo:
                    if worker.served >= RENEW:
                        _stop(worker)
                        pool[i] = worker = _start(job, setup)
                    worker.key, worker.since = todo.pop(), time.monotonic()
                    worker.served += 1
                    worker.pipe.send(worker.key)
            ready = wait([w.pipe for w in pool if w.key], timeout=1.0)
            for i, worker in enumerate(pool):
                if worker.key is None:
                    continue
                key, outcome = worker.key, None
                if worker.pipe in ready:
                    try:
                        outcome, worker.key = worker.pipe.recv(), None
                    except EOFError:
                        outcome = "crash"
                elif time.monotonic() - worker.since > limit:
                    outcome = "time"
                if isinstance(outcome, str):
                    _stop(worker)
                    pool[i] = _start(job, setup)
                if outcome is not None:
                    yield key, outcome
    finally:
        for worker in pool:
            _stop(worker)


def _start(job: Job, setup: Callable[[], None]) -> _Worker:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job, setup), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _stop(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _serve(pipe: Connection, job: Job, setup: Callable[[], None]) -> None:
    """The body of a process; output that operators print is discarded."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    setup()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(job(pipe.recv()))
