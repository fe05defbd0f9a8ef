"""The pass runner: passes in order, each recorded with what it made and how long it took and, on wish, dumped as a file."""

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
"""A folder for dumps; None: that of FXSHARD_DUMP, if any; False: none."""


@dataclass(frozen=True)
class PassRecord:
    """What a pass did: its name, how long it took, what it made."""

    name: str
    milliseconds: float
    made: str


class State(Protocol):
    """What passes hand on: a frozen dataclass that keeps their records."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def records(self) -> tuple[PassRecord, ...]: ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Pass:
    """A named step from state to state.

    ``run`` returns the new state and a line about what it made; ``readable`` gives the state's new part as text.
    """

    name: str
    run: Callable[[Any], tuple[Any, str]]
    readable: Callable[[Any], str]


def run_passes(passes: Sequence[Pass], state: S, dump: Dump = None, first: int = 0) -> S:
    """Runs ``passes`` in order; with ``dump`` (or FXSHARD_DUMP) each writes one readable file, a failing one its error.

    ``first``: the place of the first of them in the whole pipeline, which numbers the files: several runs fill one folder.
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
    """A step that is no pass: how long it took, in the log beside the passes."""
    start = time.perf_counter()
    yield
    log.debug("%s: %s (%.1f ms)", name, "done", (time.perf_counter() - start) * 1e3)


def dump_folder(dump: Dump) -> Path | None:
    """The folder that is meant, made if need be; None where nothing is to be dumped. Raises FileError for one that cannot be."""
    chosen = dump or os.environ.get("FXSHARD_DUMP")
    if not chosen or dump is False:
        return None
    return make_folder(chosen)


def _write(folder: Path, place: int, name: str, history: str, text: str) -> None:
    with atomic_file(folder / f"{place:02d}_{name}.txt") as temporary:
        temporary.write_text(f"{history}\n{text}\n", encoding="utf-8")


def _history(state: State) -> str:
    return "\n".join(f"# {r.name}: {r.made} ({r.milliseconds:.1f} ms)" for r in state.records)
