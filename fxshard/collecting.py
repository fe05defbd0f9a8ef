"""Python's search for cycles of objects, put off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 200_000
"""Objects made between two searches for cycles; Python's own default is 700."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """While modules are imported: 350,000 objects, of which 3,000 are cycles that nobody holds.

    Nor is what was imported looked through when it ends: it counts as old from then on, unless someone else has set objects aside
    (``gc.freeze``), who would lose that.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Passes make hundreds of thousands of objects that stay: looking through these for cycles took a tenth of a pass's time.

    What was there before, torch's modules and the graph, is not looked through at all meanwhile, unless someone else has set objects aside
    (``gc.freeze``), who would lose that. Within another of these, or where they are rarer already, nothing is done: even to ask whether
    objects are set aside counts them, 10 ms.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < COLLECT_EVERY:
        yield
        return
    aside = not gc.get_freeze_count()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    if aside:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if aside:
            gc.unfreeze()
