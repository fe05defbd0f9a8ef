"""Gives gloo's network threads a batch scheduling policy on Linux, so that they do not preempt threads that compute or send.

A network thread spins on a lock that the sending thread holds. Under the usual policy, a network thread that wakes up on the sender's core
preempts the sender and spins for a whole time slice (about 3 ms), while nobody can send. Under the batch policy it waits until the core is
free. Decision 0033.
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
"""Scheduling policies (sched(7)); the first exists on Linux only and is None elsewhere."""


def set_policy(policy: int | None = BATCH) -> int:
    """Sets the policy of the network threads of this process's gloo groups; returns their number, 0 on other systems.

    A thread with a policy other than ``BATCH`` and ``USUAL`` keeps it, because someone chose it on purpose.
    """
    found = 0
    if policy is None:
        return found
    for thread in _threads():
        try:
            if os.sched_getscheduler(thread) in (BATCH, USUAL):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
                found += 1
        except ProcessLookupError:  # the thread has ended with its group
            continue
        except OSError as error:  # a container may forbid or lack the call
            log.info("gloo's threads keep their scheduling policy, and each collective may take some milliseconds more: %s", error)
            return found
    return found


def _threads() -> Iterator[int]:
    for folder in THREADS.glob("*"):
        try:
            if (folder / "comm").read_bytes().strip() == NAME:
                yield int(folder.name)
        except OSError:  # the thread has ended meanwhile
            continue
