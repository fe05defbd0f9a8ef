"""How long a solve may go on: seconds, or table entries touched (which is the same on every machine)."""

from __future__ import annotations

import time


class Budget:
    """Seconds and work that are left. Work is counted in table entries read; 10^9 take one or two seconds."""

    def __init__(self, time_limit: float | None = None, work_limit: float | None = None, whole: Budget | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._work_limit = work_limit
        self._work = 0.0
        self._whole = whole

    def charge(self, entries: float) -> None:
        """Count work as done."""
        self._work += entries
        if self._whole is not None:
            self._whole.charge(entries)

    def part(self, work: float) -> Budget:
        """A budget of at most this work, which is counted here too."""
        return Budget(self.seconds_left, work if self.work_left is None else min(work, self.work_left), self)

    def end(self) -> None:
        """What is left is too little for what comes next, or what comes next is not worth it."""
        self._work_limit = self._work

    @property
    def spent(self) -> bool:
        """Whether the search has to end now."""
        if self._work_limit is not None and self._work >= self._work_limit:
            return True
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the deadline, None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def work_left(self) -> float | None:
        """Entries left to touch, None without a work limit."""
        return None if self._work_limit is None else max(0.0, self._work_limit - self._work)
