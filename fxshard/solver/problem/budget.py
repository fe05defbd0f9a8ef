"""How long a solve may go on: seconds, or table entries touched (which is the same on every machine)."""

from __future__ import annotations

import math
import time

GRACE = 5.0
"""Seconds after the end of a time limit, for the reasons why nothing fits, or for a plan that does, where it left less."""


class Budget:
    """Seconds and work that are left. Work is counted in table entries read; 10^9 take two to six seconds."""

    def __init__(
        self, time_limit: float | None = None, work_limit: float | None = None, whole: Budget | None = None, grace: float = GRACE
    ) -> None:
        self._start = time.monotonic()
        self.time_limit, self._work_limit = time_limit, work_limit
        self._grace = grace
        self.latest = math.inf if time_limit is None else self._start + time_limit + grace
        if whole is not None:
            self.latest = min(self.latest, whole.latest)
        self._work, self._ended = 0.0, False
        self._whole = whole

    def charge(self, entries: float) -> None:
        """Count work as done."""
        self._work += entries
        if self._whole is not None:
            self._whole.charge(entries)

    def part(self, work: float) -> Budget:
        """A budget of at most this work, which is counted here too."""
        return Budget(self.seconds_left, work if self.work_left is None else min(work, self.work_left), self, self._grace)

    def share(self, part: float) -> Budget:
        """A budget of so much of what is left, at most 1, in seconds and in work, which is counted here too."""
        seconds, work = self.seconds_left, self.work_left
        return Budget(None if seconds is None else part * seconds, None if work is None else part * work, self, part * self._grace)

    def last(self, work: float | None = None) -> Budget:
        """A budget for what has to be said when this one has ended: what is left of the seconds, and those of grace.

        work: at least so much where work is limited; None: any.
        """
        seconds = None if self.time_limit is None else max(0.0, self.latest - time.monotonic())
        entries = None if work is None or self.work_left is None else max(work, self.work_left)
        return Budget(seconds, entries, self, 0.0)

    def anew(self) -> Budget:
        """A budget of what this one began with."""
        return Budget(self.time_limit, self._work_limit, None, self._grace)

    def end(self) -> None:
        """What is left is too little for what comes next, or what comes next is not worth it."""
        self._ended = True

    @property
    def spent(self) -> bool:
        """Whether the search has to end now."""
        return self.work_left == 0.0 or self.seconds_left == 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end, None without one."""
        return None if self.time_limit is None else max(0.0, self._start + self.time_limit - time.monotonic())

    @property
    def work_left(self) -> float | None:
        """Entries left to touch, None without a work limit."""
        if self._ended:
            return 0.0
        return None if self._work_limit is None else max(0.0, self._work_limit - self._work)
