"""Limits on a solve: seconds, or table entries read (a measure that is the same on every machine)."""

from __future__ import annotations

import math
import time

GRACE = 5.0
"""Extra seconds after a time limit in which to find a plan that fits or to explain why none does."""


class Budget:
    """The seconds and work left. The unit of work is a table entry read; 10^9 take two to six seconds."""

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
        """Subtract work from this budget and from those that it is part of."""
        self._work += entries
        if self._whole is not None:
            self._whole.charge(entries)

    def part(self, work: float) -> Budget:
        """A budget of at most this work; what it uses is charged here too."""
        return Budget(self.seconds_left, work if self.work_left is None else min(work, self.work_left), self, self._grace)

    def share(self, part: float) -> Budget:
        """A budget of this fraction (at most 1) of the seconds and work left; what it uses is charged here too."""
        seconds, work = self.seconds_left, self.work_left
        return Budget(None if seconds is None else part * seconds, None if work is None else part * work, self, part * self._grace)

    def last(self, work: float | None = None) -> Budget:
        """A budget for the final plan or explanation after this one has ended: the seconds left plus the grace period.

        work: the least work it allows where work is limited; None: unlimited.
        """
        seconds = None if self.time_limit is None else max(0.0, self.latest - time.monotonic())
        entries = None if work is None or self.work_left is None else max(work, self.work_left)
        return Budget(seconds, entries, self, 0.0)

    def anew(self) -> Budget:
        """A new budget with this one's original limits."""
        return Budget(self.time_limit, self._work_limit, None, self._grace)

    def end(self) -> None:
        """End the search now: the rest of the budget is too small for the next step, or the step is not worth it."""
        self._ended = True

    @property
    def spent(self) -> bool:
        """Whether the search has to end now."""
        return self.work_left == 0.0 or self.seconds_left == 0.0

    @property
    def late(self) -> bool:
        """Whether the time limit has passed: for steps that charge no work, so that a search with a work limit does not depend on it."""
        return self.seconds_left == 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, None without a time limit."""
        return None if self.time_limit is None else max(0.0, self._start + self.time_limit - time.monotonic())

    @property
    def work_left(self) -> float | None:
        """Table entries left to read, None without a work limit."""
        if self._ended:
            return 0.0
        return None if self._work_limit is None else max(0.0, self._work_limit - self._work)


UNLIMITED = Budget()
"""A budget that never ends, for steps that charge nothing."""
