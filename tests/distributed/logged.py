"""Captures what a rank logs; pytest's ``caplog`` does not reach other processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects the lines that fxshard logs inside the ``with`` block, of this ``level`` and above."""
    lines: list[str] = []
    handler, logger = _Lines(lines), logging.getLogger("fxshard")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
