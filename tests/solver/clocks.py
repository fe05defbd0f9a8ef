"""Clocks for tests of time limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from fxshard.solver.problem import budget
from fxshard.solver.problem.budget import Budget


class Looks(Budget):
    """A budget whose time has passed after the clock was looked at ``looks`` times."""

    def __init__(self, looks: int) -> None:
        super().__init__(time_limit=1.0)
        self.looks = looks

    @property
    def seconds_left(self) -> float:
        """A second until the last look, then none."""
        self.looks -= 1
        return float(self.looks >= 0)


@contextmanager
def calls_as_seconds() -> Iterator[Callable[[], float]]:
    """Makes the clock of budgets advance by a second with each call of a function, on any machine; yields that clock."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "time", Clock)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield Clock.monotonic
        finally:
            sys.setprofile(before)
