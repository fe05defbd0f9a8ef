"""Heartbeats: each rank regularly writes its state to the process group's store, so that others can tell which rank was lost.

Keys are under ``fxshard/life/``, where <n> counts the process groups that this rank has had on this store:

    starts/<rank>     the number of process groups so far: the next <n>; never deleted
    <n>/<rank>        ``RankStatus`` as JSON, rewritten with each beat
    <n>/fault         the first fault, as JSON, so that all ranks report the same one

The heartbeat thread has its own connection, so that a blocking wait on the store does not silence it. Collectives cost nothing extra: the
process group counts those that were issued.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from fxshard._torch_compat.groups import issued
from fxshard.runtime.ranks.agreement import default_group

PERIOD = 0.5
"""Seconds between beats."""
MISSED_BEATS = 5
"""Missed beats after which a rank counts as lost."""
PATIENCE = 5.0
"""Seconds to wait for an answer from the store."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports about itself.

    ``state``: "outside" of watched code, "inside", "cut off" (its collective failed because of another rank), "raised", "ended", or "never
    seen". ``calls`` and ``issued``: its progress, in calls and in collectives of the last call.
    """

    beat: int = 0
    state: str = "never seen"
    calls: int = 0
    issued: int = 0
    place: str = ""
    message: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        return self.calls, self.issued


@dataclass(eq=False)
class Activity:
    """An activity that others may wait for: ``what``, in words, on ``groups``.

    ``names``: its collectives in order of issue, computed on demand; empty if unknown. ``alarm`` is called in its own thread after each
    ``limit`` seconds without a new collective.
    """

    what: str
    groups: Sequence[Any]
    names: Callable[[], Sequence[str]] = tuple
    limit: float = math.inf
    alarm: Callable[[Activity], None] | None = None
    count: int = 0
    start: int = field(default=0, init=False)

    def begin(self) -> None:
        self.count += 1
        self.start = self.total()

    def total(self) -> int:
        return sum(map(issued, self.groups))

    def issued(self) -> int:
        return self.total() - self.start

    def place(self) -> str:
        """``all_reduce of 'mm' over tp (collective 2 of 5 of the forward of program 1a2b, call 7)``."""
        names, number = self.names(), self.issued()
        call = f"{self.what}, call {self.count}" if self.count else self.what
        if not 0 < number <= len(names):
            return f"{call}, before its first collective" if names and number <= 0 else call
        return f"{names[number - 1]} (collective {number} of {len(names)} of {call})"


class Heartbeat:
    """This rank's heartbeat in one store, and access to that of the other ranks."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = _connection(store), rank
        self.base = f"fxshard/life/{self.store.add(f'fxshard/life/starts/{rank}', 1)}"
        self.calls = self.beats = 0
        self.activity: Activity | None = None
        self.last, self.state, self.message = "", "outside", ""
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.write()
        self.thread = threading.Thread(target=self._beat, name="fxshard heartbeat", daemon=True)
        self.thread.start()
        Finalize(None, self.report_end, exitpriority=0)  # at process exit, also if multiprocessing started it

    def enter(self, activity: Activity) -> Activity | None:
        """Records that this rank now does ``activity``; returns the previous activity, for ``leave``."""
        before, self.activity = self.activity, activity
        activity.begin()
        self.calls += 1
        failed, self.state = self.state in ("raised", "cut off"), "inside"
        if failed:  # overwrite the old failure now, not at the next beat
            self.report("inside")
        return before

    def leave(self, before: Activity | None) -> None:
        self.activity = before
        if self.state == "inside" and before is None:
            self.state = "outside"

    def report(self, state: str, message: str = "") -> None:
        """Writes ``state`` and the current place at once; does nothing if the store is gone."""
        self.state, self.message = state, message
        with contextlib.suppress(RuntimeError):
            self.write()

    def write(self) -> None:
        """Raises RuntimeError if the store is gone."""
        with self.lock:
            activity = self.activity
            self.beats += 1
            place, count = (activity.place(), activity.issued()) if activity is not None else ("", 0)
            status = RankStatus(self.beats, self.state, self.calls, count, place, self.message)
            self.store.set(f"{self.base}/{self.rank}", json.dumps(asdict(status)))

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """The reports of ``ranks``. Raises RuntimeError if the store is gone."""
        keys = {rank: f"{self.base}/{rank}" for rank in ranks}
        return {r: RankStatus(**json.loads(self.store.get(key))) if self.store.check([key]) else RankStatus() for r, key in keys.items()}

    def settle(self, fault: str = "") -> str:
        """The first fault found on any rank; records ``fault`` if there is none. Raises RuntimeError if the store is gone."""
        key = f"{self.base}/fault"
        if fault:
            return self.store.compare_set(key, "", fault).decode()
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def report_end(self) -> None:
        """The last report: this process ends, with its error if any."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self.stop()
        self.report("ended", first_line(error) if isinstance(error, Exception) else "")

    def stop(self) -> None:
        self.stopped.set()

    def _beat(self) -> None:
        seen, since = (0, 0), time.monotonic()
        while not self.stopped.wait(PERIOD):
            try:
                self.write()
            except RuntimeError:  # whoever needs the store reports that it is gone
                return
            activity = self.activity
            now = (self.calls, activity.issued() if activity is not None else 0)
            if activity is None or now != seen:
                seen, since = now, time.monotonic()
            elif activity.alarm is not None and time.monotonic() - since > activity.limit:
                since = time.monotonic()
                threading.Thread(target=activity.alarm, args=(activity,), name="fxshard alarm", daemon=True).start()


def first_line(error: BaseException) -> str:
    """``ValueError: its first line``."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


_HEARTBEAT: list[tuple[Any, Heartbeat]] = []


def heartbeat() -> Heartbeat | None:
    """This process's heartbeat, started on first use; None if it is alone. One per default process group."""
    group = default_group()
    if group is None:
        return None
    world = dist.group.WORLD
    if _HEARTBEAT and _HEARTBEAT[0][0] is world:
        return _HEARTBEAT[0][1]
    for _, old in _HEARTBEAT:
        old.stop()
    _HEARTBEAT[:] = [(world, Heartbeat(group.store, group.rank))]
    return _HEARTBEAT[0][1]


def _connection(store: Any) -> Any:
    """A separate connection with a short timeout; the store itself if it cannot be cloned."""
    try:
        own = store.clone()
    except (AttributeError, RuntimeError):
        return store
    own.set_timeout(timedelta(seconds=PATIENCE))
    return own
