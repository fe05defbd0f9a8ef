"""Runs work that may crash in a child process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from fxshard.errors import FxshardError
from fxshard.progress import child_processes_show, progress


def in_child(work: Callable[[Callable[[str], None]], int], what: str) -> int:
    """Runs ``work`` in a forked process and returns its result, an exit code; ``work`` receives a function to note its progress.

    Raises FxshardError, with the last note, if a signal ends the process. ``what``: describes the work in the error. If torch is already
    loaded (a call from Python), a fork would hang on torch's threads; then, or without fork, the work runs in this process.
    """
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return work(lambda _: None)
    with tempfile.TemporaryFile() as place:
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(_shown(work, what, place)))
        with child_processes_show():
            child.start()
            before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            try:
                child.join()
            finally:  # if this process is told to end, it ends the child too
                child.terminate()
                signal.signal(signal.SIGTERM, before)
        place.seek(0)
        where = place.read().decode() or None
    code = child.exitcode or 0
    if code < 0:
        remedy = "a kernel crashed on these shapes, which does not judge the rule; give samples of other sizes: --sample FILE.py:FUNCTION"
        raise FxshardError(f"{what} was ended by {signal.Signals(-code).name}", where=where, remedy=remedy)
    return code


def _shown(work: Callable[[Callable[[str], None]], int], what: str, place: IO[bytes]) -> int:
    with progress(what):
        return work(lambda text: _overwrite(place, text))


def _overwrite(place: IO[bytes], text: str) -> None:
    place.seek(0)
    place.truncate()
    place.write(text.encode())
    place.flush()
