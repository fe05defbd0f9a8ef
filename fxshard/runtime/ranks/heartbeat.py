"""Signs of life: each rank beats in the process group's store and says there what it is doing, so that one can tell who was lost.

Under ``fxshard/life/`` of the store, where <n> counts the process groups that this rank has had on it:

    starts/<rank>     how many there were: the next <n>; stays for good
    <n>/<rank>        ``Life`` as JSON, written anew with each beat
    <n>/fault         what went wrong first, as JSON: all ranks tell the same story

The thread that beats has a connection of its own, so that a wait in the store does not silence it. A collective costs nothing: what
was issued is counted by the process group.
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
LOST = 5
"""Beats that a living rank does not miss."""
PATIENCE = 5.0
"""Seconds that the store has for an answer."""


@dataclass(frozen=True)
class Life:
    """What a rank says of itself.

    ``state``: "outside" of what is watched, "inside", "cut off" (a collective of its own failed for another rank's sake),
    "raised", "ended", or "never seen". ``calls`` and ``issued``: how far it came, in calls and in collectives of the last one.
    """

    beat: int = 0
    state: str = "never seen"
    calls: int = 0
    issued: int = 0
    place: str = ""
    said: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        return self.calls, self.issued


@dataclass(eq=False)
class Doing:
    """What a rank does that others may wait for: ``what``, in words, on ``groups``.

    ``names``: its collectives, in the order of issue, made when they are asked for; empty where nobody knows. ``alarm`` is
    called, in a thread of its own, after each ``limit`` seconds without a new collective.
    """

    what: str
    groups: Sequence[Any]
    names: Callable[[], Sequence[str]] = tuple
    limit: float = math.inf
    alarm: Callable[[Doing], None] | None = None
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


class Heart:
    """This rank's beat in one store, and the ears for the others'."""

    def __init__(self, store: Any, rank: int, period: float = PERIOD) -> None:
        self.store, self.rank, self.period = _connection(store), rank, period
        self.base = f"fxshard/life/{self.store.add(f'fxshard/life/starts/{rank}', 1)}"
        self.calls = self.beats = 0
        self.doing: Doing | None = None
        self.last, self.state, self.said = "", "outside", ""
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.write()
        self.thread = threading.Thread(target=self._beat, name="fxshard heartbeat", daemon=True)
        self.thread.start()
        Finalize(None, self.goodbye, exitpriority=0)  # at the end of this process, also where it was started by multiprocessing

    def enter(self, doing: Doing) -> Doing | None:
        """From here on this rank does ``doing``; what it did before, for ``leave``."""
        before, self.doing = self.doing, doing
        doing.begin()
        self.calls += 1
        failed, self.state = self.state in ("raised", "cut off"), "inside"
        if failed:  # what it said then is over, and must not stand until the next beat
            self.tell("inside")
        return before

    def leave(self, before: Doing | None) -> None:
        self.doing = before
        if self.state == "inside" and before is None:
            self.state = "outside"

    def tell(self, state: str, said: str = "") -> None:
        """Says at once that this rank is in ``state``, and where; keeps quiet where there is no store any more."""
        self.state, self.said = state, said
        with contextlib.suppress(RuntimeError):
            self.write()

    def write(self) -> None:
        """Raises RuntimeError when the store is gone."""
        with self.lock:
            doing = self.doing
            self.beats += 1
            place, count = (doing.place(), doing.issued()) if doing is not None else ("", 0)
            life = Life(self.beats, self.state, self.calls, count, place, self.said)
            self.store.set(f"{self.base}/{self.rank}", json.dumps(asdict(life)))

    def lives(self, ranks: Iterable[int]) -> dict[int, Life]:
        """What ``ranks`` say. Raises RuntimeError when the store is gone."""
        return {rank: Life(**json.loads(self.store.get(key))) if self.store.check([key]) else Life() for rank, key in self._keys(ranks)}

    def settle(self, fault: str = "") -> str:
        """The fault that was found first, on whichever rank; ``fault`` if none was so far. Raises RuntimeError when the store is gone."""
        key = f"{self.base}/fault"
        if fault:
            return self.store.compare_set(key, "", fault).decode()
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def goodbye(self) -> None:
        """The last word: this process ends, with what error if any."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self.stop()
        self.tell("ended", said_of(error) if isinstance(error, Exception) else "")

    def stop(self) -> None:
        self.stopped.set()

    def _keys(self, ranks: Iterable[int]) -> list[tuple[int, str]]:
        return [(rank, f"{self.base}/{rank}") for rank in ranks]

    def _beat(self) -> None:
        seen, since = (0, 0), time.monotonic()
        while not self.stopped.wait(self.period):
            try:
                self.write()
            except RuntimeError:  # whoever needs the store will say that it is gone
                return
            doing = self.doing
            now = (self.calls, doing.issued() if doing is not None else 0)
            if doing is None or now != seen:
                seen, since = now, time.monotonic()
            elif doing.alarm is not None and time.monotonic() - since > doing.limit:
                since = time.monotonic()
                threading.Thread(target=doing.alarm, args=(doing,), name="fxshard alarm", daemon=True).start()


def said_of(error: BaseException) -> str:
    """``ValueError: its first line``."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


_HEART: list[tuple[Any, Heart]] = []


def heart() -> Heart | None:
    """This process's heart, started when it is first asked for; None when it is alone. One for each default process group."""
    group = default_group()
    if group is None:
        return None
    world = dist.group.WORLD
    if _HEART and _HEART[0][0] is world:
        return _HEART[0][1]
    for _, old in _HEART:
        old.stop()
    _HEART[:] = [(world, Heart(group.store, group.rank))]
    return _HEART[0][1]


def _connection(store: Any) -> Any:
    """A connection of its own, with little patience; the store itself where it has none."""
    try:
        own = store.clone()
    except (AttributeError, RuntimeError):
        return store
    own.set_timeout(timedelta(seconds=PATIENCE))
    return own
