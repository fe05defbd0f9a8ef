"""Python's search for cycles of objects, made rare: with torch imported, looking through all that stays took a tenth of the tests' time."""

from __future__ import annotations

import gc

from fxshard.collecting import COLLECT_EVERY

EVERY = COLLECT_EVERY // 4
"""Objects made between two searches: fewer than within a pass, which puts them off as it does for any user."""


def collect_rarely() -> None:
    gc.set_threshold(EVERY, 10, 3)
