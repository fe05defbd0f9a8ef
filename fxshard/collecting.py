"""Python's search for cycles of objects, put off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 50_000
"""Objects made between two searches for cycles; Python's own default is 700."""

_aside = False
"""Whether what was there before is set aside here; the interpreter's answer takes it as long as there are objects, 40 ms a pass."""


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Passes make hundreds of thousands of objects that stay, and importing them does: looking through these for cycles took a tenth of
    a pass's time and a quarter of a warm start's.

    What was there before, torch's modules and the graph, is not looked through at all meanwhile, unless someone else has set objects aside
    (``gc.freeze``), who would lose that.
    """
    global _aside
    before, aside = gc.get_threshold(), not _aside and not gc.get_freeze_count()
    gc.set_threshold(max(before[0], COLLECT_EVERY) if before[0] else 0, *before[1:])
    if aside:
        _aside = True
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if aside:
            gc.unfreeze()
            _aside = False
