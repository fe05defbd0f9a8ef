"""Private names of torch (2.13): a faster lookup of the place where an operator is registered, which torch records for error messages.

What would replace it: ``torch.library``, were it as fast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType, SimpleNamespace
from unittest import mock

import torch


def source(stacklevel: int) -> str:
    """File and line of the caller ``stacklevel`` frames up; torch's version reads the file and searches all modules."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame: FrameType) -> ModuleType | None:
    """The module of a frame's code; ``inspect.getmodule`` searches the files of all modules."""
    return sys.modules.get(frame.f_globals.get("__name__", ""))


@contextlib.contextmanager
def quick_sources() -> Iterator[None]:
    """Within it, registering operators is faster: it saves a millisecond for each of fxshard's eighty."""
    inspect = SimpleNamespace(getmodule=module_of)
    with mock.patch.object(torch._library.utils, "get_source", source), mock.patch.object(torch.library, "inspect", inspect):
        yield
