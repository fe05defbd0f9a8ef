"""Measures one cell of the table: an anchor with a mechanism switched off, in a process forked from one that has prepared the anchor."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing as mp
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.ablations.anchors import Anchor, Prepared
from bench.ablations.mechanism import Mechanism, used_of
from fxshard.solver import Budget, warm_up

LIMIT = 300
"""Limit on the processor time of a cell, in seconds; beyond it the cell has no figures."""

UNUSED = "not used"
"""The reason of a cell without figures whose anchor never calls the mechanism."""


@dataclass(frozen=True)
class Figures:
    """``seconds``: processor time; ``work``: table entries that the solver counted; ``memory``: bytes by which the process grew."""

    objective: float
    bound: float
    work: float
    seconds: float
    memory: int

    @property
    def gap(self) -> float:
        """The relative gap; 1 if no plan was found."""
        return (self.objective - self.bound) / abs(self.objective) if 0 < abs(self.objective) < float("inf") else 1.0


@dataclass(frozen=True)
class Cell:
    """``mechanism``: the one that is off, or ""; ``figures``: None if there are none, for ``reason``."""

    anchor: str
    mechanism: str
    figures: Figures | None
    reason: str = ""


def cells(anchor: Anchor, mechanisms: Sequence[Mechanism], data: Path | None, runs: int = 1) -> Iterator[Cell]:
    """The cells of an anchor: with all mechanisms, and with each one off that it uses; each is the fastest of several runs."""
    yield from _in_fork(_prepared_cells, anchor, mechanisms, data, runs)


def _prepared_cells(send: Callable[[Cell], None], anchor: Anchor, mechanisms: Sequence[Mechanism], data: Path | None, runs: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm_up()
    prepared = anchor.prepare(data)
    gc.collect()
    gc.freeze()
    base, used = _fastest(prepared, None, mechanisms, runs)
    send(_cell(anchor, "", base))
    for mechanism in mechanisms:
        if not isinstance(base, Figures) or mechanism.name not in used:
            send(Cell(anchor.name, mechanism.name, None, UNUSED))
        else:
            send(_cell(anchor, mechanism.name, _fastest(prepared, mechanism, (), runs)[0]))


def _cell(anchor: Anchor, mechanism: str, found: Figures | str) -> Cell:
    return Cell(anchor.name, mechanism, None, found) if isinstance(found, str) else Cell(anchor.name, mechanism, found)


def _fastest(prepared: Prepared, off: Mechanism | None, watched: Sequence[Mechanism], runs: int) -> tuple[Figures | str, frozenset[str]]:
    """The fastest run, or the reason why there are no figures; and the watched mechanisms that the anchor used."""
    found = [one for _ in range(runs) for one in _in_fork(_measured, prepared, off, watched)]
    if len(found) < runs:
        return f"no answer within {LIMIT} s of the processor", frozenset()
    best = min(found, key=lambda one: one[0].seconds if isinstance(one[0], Figures) else 0.0)
    return best[0], best[1]


def _measured(send: Callable[[object], None], prepared: Prepared, off: Mechanism | None, watched: Sequence[Mechanism]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    before = _resident()
    with contextlib.nullcontext() if off is None else off.switched_off(), used_of(watched) as used, _counted() as work:
        begin = time.process_time()
        try:
            objective, bound = prepared()
        except Exception as error:
            send((f"{type(error).__name__}: {error}".split("\n")[0][:200], frozenset()))
            return
        seconds = time.process_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    send((Figures(objective, bound, work[0], seconds, max(0, grown)), frozenset(used)))


@contextlib.contextmanager
def _counted() -> Iterator[list[float]]:
    """Counts the entries charged to budgets, each once: a part of a budget also charges the whole, which is not counted again."""
    charge, total = Budget.charge, [0.0]

    def counted(budget: Budget, entries: float) -> None:
        total[0] += entries if getattr(budget, "_whole", None) is None else 0.0
        charge(budget, entries)

    with mock.patch.object(Budget, "charge", counted):
        yield total


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _in_fork(job: Callable[..., None], *given: Any) -> Iterator[Any]:
    """Runs a job in a forked process; yields the objects that it sends."""
    context = mp.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_job, args=(send, job, given))
    process.start()
    send.close()
    with contextlib.suppress(EOFError):
        while True:
            yield receive.recv()
    process.join()


def _job(send: Connection, job: Callable[..., None], given: tuple[Any, ...]) -> None:
    gc.freeze()  # what is garbage already stays: the end of a process group would wait for threads, which a fork does not have
    job(send.send, *given)
    send.close()
