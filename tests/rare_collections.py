"""Makes Python's cycle collector run seldom: with torch imported, it took a tenth of the time of the tests."""

from __future__ import annotations

import gc

from fxshard.collecting import COLLECT_EVERY

EVERY = COLLECT_EVERY // 4
"""Objects made between two collections. Fewer than during a pass, which delays collections for users, too."""


def collect_rarely() -> None:
    gc.set_threshold(EVERY, 10, 3)
