"""What takes long says what it does: one line on a terminal after two seconds, nothing where stderr is a file or a pipe.

``with progress("planning"):`` may be nested: the line shows the innermost. It is cleared before anything is printed, and comes back after
two more seconds of silence. Under torchrun only the first rank shows it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
PATIENCE, TICK = 2.0, 0.2
"""Seconds of silence until something is shown, and between two updates."""
ROOM_OF_SECONDS, ROOM_OF_BAR = 10, 30
"""Columns that a description leaves for what follows it."""
WIDTH = 80
"""Of a terminal that does not say its own."""


class Progress:
    """A piece of work. ``done``: its parts that are done; ``about``: what runs now."""

    def __init__(self, about: str, parts: int | None) -> None:
        self.about, self.parts, self.done = about, parts, 0
        self.started = time.monotonic()

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
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield told
        return
    _line.begin(told)
    try:
        yield told
    finally:
        _line.end(told)


def watched(entries: Sequence[T], about: str) -> Iterator[T]:
    """``entries``, with a bar while they are iterated."""
    with progress(about, len(entries)) as told:
        for entry in entries:
            yield entry
            told.finish()


@contextmanager
def child_processes_show() -> Iterator[None]:
    """Shows nothing meanwhile, so that child processes have the terminal to themselves."""
    works = list(_line.works)
    for told in works:
        _line.end(told)
    try:
        yield
    finally:
        for told in works:
            _line.begin(told)


class _Line:
    """The line on the terminal, which a thread draws while there is work."""

    def __init__(self) -> None:
        self.works: list[Progress] = []
        self.terminal: Any = None
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.shown, self.mid_line, self.silent_since = 0, False, 0.0

    def begin(self, told: Progress) -> None:
        self.works.append(told)
        if self.thread is None:
            self.terminal, self.silent_since, self.mid_line = _plain(sys.stderr), time.monotonic(), False
            self.ended = threading.Event()
            sys.stdout, sys.stderr = (_Stream(s, self) if s.isatty() else s for s in map(_plain, (sys.stdout, sys.stderr)))
            self.thread = threading.Thread(target=self._show, args=(self.ended,), daemon=True)
            self.thread.start()

    def end(self, told: Progress) -> None:
        if told in self.works:
            self.works.remove(told)
        if not self.works and self.thread is not None:
            self.ended.set()
            self.thread.join()
            self._leave()

    def forget(self) -> None:
        """In a forked child, which has neither the thread nor, perhaps, a lock that is free."""
        self.lock = threading.RLock()
        self.works, self.shown = [], 0
        self._leave()

    @contextmanager
    def cleared(self, text: str) -> Iterator[None]:
        """While ``text`` is printed."""
        with self.lock:
            self.clear()
            self.silent_since = time.monotonic()
            self.mid_line = not text.endswith(("\n", "\r")) if text else self.mid_line
            yield

    def clear(self) -> None:
        if self.shown:
            self._write("\r" + " " * self.shown + "\r")
            self.shown = 0

    def _leave(self) -> None:
        self.thread = None
        sys.stdout, sys.stderr = _plain(sys.stdout), _plain(sys.stderr)

    def _show(self, ended: threading.Event) -> None:
        while not ended.wait(TICK):
            if self._due():
                text = self._text()
                with self.lock:
                    if self._due():
                        self._draw(text)
        with self.lock:
            self.clear()

    def _due(self) -> bool:
        return not self.mid_line and time.monotonic() - self.silent_since >= PATIENCE

    def _text(self) -> str:
        """Made without the lock: it imports tqdm, and what the other thread imports may print."""
        works, width = self.works[-1:], _width()
        return _text(works[0], width)[:width] if works else ""

    def _draw(self, text: str) -> None:
        self._write("\r" + text.ljust(self.shown))
        self.shown = len(text)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            self.terminal.write(text)
            self.terminal.flush()


class _Stream:
    """A stream to the terminal that clears the line before it writes."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self.plain, self.line = stream, line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def write(self, text: str) -> int:
        with self.line.cleared(text):
            return self.plain.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _plain(stream: Any) -> Any:
    """The stream without ours around it."""
    return stream.plain if isinstance(stream, _Stream) else stream


def _text(told: Progress, width: int) -> str:
    from tqdm import tqdm

    form = "{desc}: {n}/{total} |{bar}| {elapsed}" if told.parts else "{desc}: {elapsed}"
    room = max(1, width - (ROOM_OF_BAR if told.parts else ROOM_OF_SECONDS))
    about = told.about if len(told.about) <= room else told.about[: max(0, room - 3)] + "..."
    seconds = time.monotonic() - told.started
    return tqdm.format_meter(told.done, told.parts, seconds, ncols=width, prefix=about, bar_format=form)


def _width() -> int:
    """One less than the terminal's columns, since the last one may wrap."""
    columns = 0
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return (columns or WIDTH) - 1


_line = _Line()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_line.forget)
