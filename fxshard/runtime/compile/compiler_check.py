"""Asking the C++ compiler early: what Inductor's first kernel for the CPU would wait for happens while the model is traced and planned.

Inductor compiles programs for each set of vector instructions, to see which work, and the header of its kernels: some twelve seconds of
other processes on a machine where that was never done, one behind the other. Here only the best set is asked for, and the header is
compiled at the same time, as that set wants it. In each process Inductor then loads those programs in processes of their own, a third of a
second; where all of them worked a file of the cache says so, and they are not loaded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from functools import partial
from pathlib import Path

from fxshard import disk_cache
from fxshard._torch_compat.inductor import cpp
from fxshard.errors import FxshardError
from fxshard.files import atomic_file, make_folder

log = logging.getLogger("fxshard")
ALL_WORK = "all sets of vector instructions work\n"
_BEGUN: list[threading.Thread] = []
"""The threads that were begun in this process; the first of them asks."""


def ask_compiler(cache: bool = True) -> None:
    """Begins to ask and to compile the header, in threads, unless the answer is known; once a process.

    ``cache``: whether a file may say it.
    """
    if _BEGUN:
        return
    path = _file() if cache else None
    if path is not None and path.is_file() and path.read_bytes() == ALL_WORK.encode():
        cpp.take_answer()
        return
    cpp.import_compiler()
    for begin in (partial(_ask, path), _precompile):
        _BEGUN.append(threading.Thread(target=begin, name="fxshard-compiler", daemon=True))
        _BEGUN[-1].start()


def wait_for_compiler() -> None:
    """Waits for the answer; for the header Inductor waits itself, once it has a kernel."""
    for thread in _BEGUN[:1]:
        thread.join()


def _file() -> Path | None:
    asked, folder = cpp.question(), disk_cache.folder()
    if not asked or folder is None:
        return None
    return folder / f"compiler-v2-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:40]}.txt"


def _ask(path: Path | None) -> None:
    try:
        all_work = cpp.ask()
    except Exception as error:  # Inductor's own first kernel fails alike, where it is an error with a remedy
        log.debug("the C++ compiler could not be asked ahead: %s", error)
        return
    if path is None or not all_work:
        return
    try:
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_text(ALL_WORK, encoding="utf-8")
    except FxshardError as error:
        log.debug("what the C++ compiler can do is not kept for the next start: %s", error.what)


def _precompile() -> None:
    try:
        cpp.precompile_header()
    except Exception as error:
        log.debug("the header of kernels could not be compiled ahead: %s", error)
