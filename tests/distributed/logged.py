"""What a rank logs, where pytest's own fixture does not reach."""

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
def logged() -> Iterator[list[str]]:
    """The lines that fxshard logs meanwhile."""
    lines: list[str] = []
    handler, logger = _Lines(lines), logging.getLogger("fxshard")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
