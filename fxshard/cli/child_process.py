"""Work that may end its process, in one of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from fxshard.errors import FxshardError


def in_child(work: Callable[[Callable[[str], None]], int], what: str) -> int:
    """What ``work`` returns (an exit code), in a forked process; ``work`` is given a function that notes down where it is.

    Raises FxshardError, with that note, where a signal ends the process. ``what``: is being done, for the error.
    Where torch is loaded already (a call from Python) a copy of its threads would hang: there, as where there is no fork, it runs here.
    """
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return work(lambda _: None)
    with tempfile.TemporaryFile() as place:
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work(lambda text: _overwrite(place, text))))
        child.start()
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            child.join()
        finally:  # who ends this process ends what it started
            child.terminate()
            signal.signal(signal.SIGTERM, before)
        place.seek(0)
        where = place.read().decode() or None
    code = child.exitcode or 0
    if code < 0:
        remedy = "its kernel cannot bear such shapes, which is no verdict on a rule; give samples of other sizes: --sample FILE.py:FUNCTION"
        raise FxshardError(f"{what} was ended by {signal.Signals(-code).name}", where=where, remedy=remedy)
    return code


def _overwrite(place: IO[bytes], text: str) -> None:
    place.seek(0)
    place.truncate()
    place.write(text.encode())
    place.flush()
