"""Real training steps on two gloo ranks, with and without a mechanism of the runtime, in turns.

Each mechanism is off in a pair of processes of its own; a second pair has all mechanisms. One pair steps while the other waits, in an order
that alternates, so that a load of the machine meets both. The model is that of ``bench.training``.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from bench.ablations.mechanism import Mechanism
from bench.ablations.mechanisms import MECHANISMS

RANKS = 2
WARM = 3
"""Steps before the first that counts: the first compiles."""

Way = tuple[str, str, int, int]
"""(key of ``bench.training.ours.OURS``, compiler, width, length)."""


@dataclass(frozen=True)
class Took:
    """Of one step on the slower rank: seconds by the clock and of the processor."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Compared:
    """What each pair of steps took without the mechanism, as a multiple of what it took with it, and the same of starting."""

    mechanism: str
    wall: tuple[float, ...]
    processor: tuple[float, ...]
    start: float
    start_processor: float


def compared(mechanism: Mechanism, way: Way, rounds: int) -> Compared:
    """Steps with and without a mechanism, ``rounds`` of each."""
    with _ranks("", way) as (started, whole), _ranks(mechanism.name, way) as (started_without, without):
        pairs = []
        for turn in range(rounds):
            took = {id(one): _step(one) for one in ((whole, without) if turn % 2 else (without, whole))}
            pairs.append((took[id(whole)], took[id(without)]))
    return Compared(
        mechanism.name,
        tuple(b.wall / a.wall for a, b in pairs),
        tuple(b.processor / a.processor for a, b in pairs),
        started_without.wall / started.wall,
        started_without.processor / started.processor,
    )


def row(one: Compared, lines: int) -> tuple[object, ...]:
    """A row of the table: medians, and the middle half of the ratios."""
    return one.mechanism, lines, _middle(one.wall), _middle(one.processor), f"{one.start_processor:.2f}"


HEADERS = ("without", "lines", "time of a step", "processor time of a step", "processor time of starting")


def _middle(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


@contextlib.contextmanager
def _ranks(without: str, way: Way) -> Iterator[tuple[Took, list[Connection]]]:
    """Two ranks that wait for orders, and what starting them took."""
    context, ends, processes = mp.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            here, there = context.Pipe()
            processes.append(context.Process(target=_rank, args=(rank, without, way, folder, there), daemon=True))
            processes[-1].start()
            there.close()
            ends.append(here)
        try:
            yield _slower(ends), ends
        finally:
            for end, process in zip(ends, processes, strict=True):
                with contextlib.suppress(OSError):
                    end.send(False)
                process.join(30)
                process.kill()


def _step(ends: Sequence[Connection]) -> Took:
    for end in ends:
        end.send(True)
    return _slower(ends)


def _slower(ends: Sequence[Connection]) -> Took:
    found = [end.recv() for end in ends]
    return Took(max(one.wall for one in found), max(one.processor for one in found))


def _rank(rank: int, without: str, way: Way, folder: str, orders: Connection) -> None:
    """A rank: prepares the step, then runs two for each order, until the order is False."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    off = next((one for one in MECHANISMS if one.name == without), None)
    with off.switched_off() if off else contextlib.nullcontext():
        step, took = _timed(lambda: _prepared(way))
        orders.send(took)
        while orders.recv():
            dist.barrier()
            orders.send(_timed(lambda: (step(), step()))[1])
    dist.destroy_process_group()


def _prepared(way: Way) -> Any:
    """The step of a model that is planned, compiled and warm. No cache is read: it may have code of the other pair."""
    from torch.distributed.device_mesh import init_device_mesh

    from bench.training.ours import OURS
    from bench.training.peers import Setting

    name, compiler, width, length = way
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    step = OURS[name](Setting(width, length, mesh), cache=False, compiler=compiler).step
    for _ in range(WARM):
        step()
    return step


def _timed(run: Any) -> tuple[Any, Took]:
    wall, processor = time.perf_counter(), time.process_time()
    found = run()
    return found, Took(time.perf_counter() - wall, time.process_time() - processor)
