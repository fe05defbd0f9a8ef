"""Private names of torch (2.13): where an operator was registered, which torch notes for its errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType, SimpleNamespace
from unittest import mock

import torch


def source(stacklevel: int) -> str:
    """File and line of the caller, of the caller's caller, ...: as torch has it, which reads the file and looks through all modules."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame: FrameType) -> ModuleType | None:
    """The module whose code a frame runs: as ``inspect.getmodule``, which looks through the files of all modules."""
    return sys.modules.get(frame.f_globals.get("__name__", ""))


@contextlib.contextmanager
def quick_sources() -> Iterator[None]:
    """While fxshard registers its operators: some eighty, at a millisecond each."""
    inspect = SimpleNamespace(getmodule=module_of)
    with mock.patch.object(torch._library.utils, "get_source", source), mock.patch.object(torch.library, "inspect", inspect):
        yield
