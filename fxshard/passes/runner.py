"""The pass runner: runs passes in order, records the outcome and time of each and, on request, dumps the state to files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from fxshard.collecting import few_collections
from fxshard.files import atomic_file, make_folder

log = logging.getLogger("fxshard")

Dump = str | Path | Literal[False] | None
"""A folder for dumps; None: the one in FXSHARD_DUMP, if set; False: no dumps."""


@dataclass(frozen=True)
class PassRecord:
    """A pass's name, its duration and a line about its result."""

    name: str
    milliseconds: float
    made: str


class State(Protocol):
    """The state that passes hand on: a frozen dataclass with the records of the passes."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def records(self) -> tuple[PassRecord, ...]: ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Pass:
    """A named function from state to state.

    ``run`` returns the new state and a line about the result; ``readable`` renders the new part of the state as text.
    """

    name: str
    run: Callable[[Any], tuple[Any, str]]
    readable: Callable[[Any], str]


def run_passes(passes: Sequence[Pass], state: S, dump: Dump = None, first: int = 0) -> S:
    """Runs ``passes`` in order; with ``dump`` (or FXSHARD_DUMP) each writes one text file, and a failing pass writes its error.

    ``first``: the index of the first pass in the whole pipeline. It numbers the files, so that several runs can share a folder.
    """
    folder = dump_folder(dump)
    for place, one in enumerate(passes, first):
        start = time.perf_counter()
        try:
            with few_collections():
                state, made = one.run(state)
        except Exception:
            if folder is not None:
                _write(folder, place, f"{one.name}.failed", _history(state), traceback.format_exc())
            raise
        record = PassRecord(one.name, (time.perf_counter() - start) * 1e3, made)
        log.debug("%s: %s (%.1f ms)", record.name, record.made, record.milliseconds)
        state = dataclasses.replace(state, records=(*state.records, record))
        if folder is not None:
            _write(folder, place, one.name, _history(state), one.readable(state))
    return state


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Logs the duration of a step that is not a pass."""
    start = time.perf_counter()
    yield
    log.debug("%s: %s (%.1f ms)", name, "done", (time.perf_counter() - start) * 1e3)


def dump_folder(dump: Dump) -> Path | None:
    """The folder for dumps, created if needed; None without dumps. Raises FileError if it cannot be created."""
    chosen = dump or os.environ.get("FXSHARD_DUMP")
    if not chosen or dump is False:
        return None
    return make_folder(chosen)


def _write(folder: Path, place: int, name: str, history: str, text: str) -> None:
    with atomic_file(folder / f"{place:02d}_{name}.txt") as temporary:
        temporary.write_text(f"{history}\n{text}\n", encoding="utf-8")


def _history(state: State) -> str:
    return "\n".join(f"# {r.name}: {r.made} ({r.milliseconds:.1f} ms)" for r in state.records)
