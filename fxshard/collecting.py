"""Fewer garbage collections, Python's searches for unreachable cycles, while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 200_000
"""Number of new objects between two collections; Python's own default is 700."""


_found_frozen = False


def _frozen_by_others() -> bool:
    """Whether someone else has frozen objects. Once found, they count as frozen for good: Python visits all of them to count them, which
    took two fifths of the time of processes that a server with frozen imports had forked."""
    global _found_frozen
    _found_frozen = _found_frozen or gc.get_freeze_count() > 0
    return _found_frozen


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Allows no collection: for imports, which make 350,000 objects, only 3,000 of them in unreachable cycles.

    Nor does the next collection visit the imported objects: ``gc.freeze`` and ``gc.unfreeze`` move them to the oldest generation. This is
    left out if someone else has frozen objects, because it would unfreeze these too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not _frozen_by_others():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Makes collections rare: passes make hundreds of thousands of objects that stay, and visiting them took a tenth of a pass's time.

    Objects that existed before, such as torch's modules and the graph, are frozen meanwhile, so that no collection visits them. This is
    left out if someone else has frozen objects, because it would unfreeze these too. Inside another ``few_collections``, or if collections
    are rarer already, it does nothing.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < COLLECT_EVERY:
        yield
        return
    aside = not _frozen_by_others()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    if aside:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if aside:
            gc.unfreeze()
