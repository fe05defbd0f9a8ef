"""What a command says while it works: a line on a terminal after two seconds, nothing where stderr is a file or a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE, TICK = 2.0, 0.2
"""Seconds until something is shown, and between two updates."""


class Progress:
    """``done``: parts of the work that are done; ``about``: what runs now."""

    def __init__(self, about: str, parts: int | None) -> None:
        self.about, self.parts, self.done = about, parts, 0

    def next(self, about: str) -> None:
        """A further part begins."""
        self.about = about

    def finish(self) -> None:
        """A part has ended."""
        self.done += 1


@contextmanager
def progress(about: str, parts: int | None = None) -> Iterator[Progress]:
    """Shows a bar of ``parts``, or the seconds if their number is unknown, on a terminal."""
    told = Progress(about, parts)
    if not sys.stderr.isatty():
        yield told
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(told, ended), daemon=True)
    thread.start()
    try:
        yield told
    finally:
        ended.set()
        thread.join()


def _show(told: Progress, ended: threading.Event) -> None:
    started = time.monotonic()
    if ended.wait(PATIENCE):
        return
    from tqdm import tqdm

    form = "{desc}: {n}/{total} |{bar}| {elapsed}" if told.parts else "{desc}: {elapsed}"
    with tqdm(total=told.parts, desc=told.about, leave=False, bar_format=form, file=sys.stderr) as bar:
        bar.start_t -= time.monotonic() - started
        while not ended.wait(TICK):
            bar.n = told.done
            bar.set_description_str(told.about, refresh=False)
            bar.refresh()
