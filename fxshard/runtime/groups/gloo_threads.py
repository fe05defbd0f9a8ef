"""Gloo's network threads, on Linux: they wait for a core instead of taking it from whoever computes or sends there.

Such a thread asks for a lock that the sending thread holds, and asks again and again until it has it. Woken on the core of that thread it
took the core away first, and spun for its whole slice (about 3 ms) while nobody could send. As a batch thread it runs when the core
is free. Decision 0033.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("fxshard")

THREADS = Path("/proc/self/task")
NAME = b"gloo_tcp_loop"
BATCH, USUAL = getattr(os, "SCHED_BATCH", None), getattr(os, "SCHED_OTHER", None)
"""Policies of threads (sched(7)); the first is Linux's alone, None elsewhere."""


def schedule(policy: int | None = BATCH) -> int:
    """Gives the network threads of the gloo groups that this process has a policy, and tells how many; 0 on other systems.

    Threads whose policy is neither of the two were scheduled by someone on purpose, and stay as they are.
    """
    found = 0
    if policy is None:
        return found
    for thread in _threads():
        try:
            if os.sched_getscheduler(thread) in (BATCH, USUAL):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
                found += 1
        except ProcessLookupError:  # its group is gone
            continue
        except OSError as error:  # a container may forbid it, or not know it
            log.info("gloo's threads stay as they are, and each collective may take some milliseconds more: %s", error)
            return found
    return found


def _threads() -> Iterator[int]:
    for folder in THREADS.glob("*"):
        try:
            if (folder / "comm").read_bytes().strip() == NAME:
                yield int(folder.name)
        except OSError:  # it ended meanwhile
            continue
