"""Checks the C++ compiler early, while the model is traced and planned, so that Inductor's first CPU kernel need not wait for it.

On a new machine Inductor compiles a test program for each set of vector instructions, then the header of its kernels: some twelve
seconds, one after the other. Here only the best set is tested, and the header is compiled for it at the same time. In each process
Inductor then loads the test programs in subprocesses, a third of a second; if all of them worked, a cache file says so, and they are not
loaded again.
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
_THREADS: list[threading.Thread] = []
"""The threads started in this process; the first checks the compiler."""


def start_compiler_check(cache: bool = True) -> None:
    """Starts the check and the compilation of the header, in threads, unless the result is known; once per process.

    ``cache``: whether the result may come from a file.
    """
    if _THREADS:
        return
    path = _file() if cache else None
    if path is not None and path.is_file() and path.read_bytes() == ALL_WORK.encode():
        cpp.take_answer()
        return
    cpp.import_compiler()
    for begin in (partial(_check_compiler, path), _precompile):
        _THREADS.append(threading.Thread(target=begin, name="fxshard-compiler", daemon=True))
        _THREADS[-1].start()


def wait_for_compiler_check() -> None:
    """Waits for the check; Inductor itself waits for the header when it has a kernel."""
    for thread in _THREADS[:1]:
        thread.join()


def _file() -> Path | None:
    asked, folder = cpp.vector_instructions_key(), disk_cache.folder()
    if not asked or folder is None:
        return None
    return folder / f"compiler-v2-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:40]}.txt"


def _check_compiler(path: Path | None) -> None:
    try:
        all_work = cpp.check_vector_instructions()
    except Exception as error:  # Inductor's first kernel fails in the same way, and that error has a remedy
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
