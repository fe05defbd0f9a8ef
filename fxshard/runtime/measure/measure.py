"""Measures operators on this device and collectives among ranks, in microseconds.

A measurement is the mean time per call in a batch. Rounds cycle through all cases, so that a disturbance affects one round of many cases,
not all rounds of one. For operators the fastest round counts, since disturbances only add time. For collectives the median counts, since
waiting for other ranks to wake up is part of their cost. The slowest rank's time is used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.groups import backend_name
from fxshard.cost.fit import COPY, CollectiveTime, OpTime
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.runtime.groups.reduce_scatter import reduce_scatter

c10d = torch.ops._c10d_functional
Work = Callable[[], object]
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float64), "cuda": (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
MIN_TIME = 1.0
"""Lower limit on the time of a collective, in microseconds, used where noise exceeds the measured difference."""
PRODUCTS_TIME, REPETITIONS = 4000.0, 6
"""Microseconds of matrix products before each collective, and repetitions of both in a batch. A collective takes longer after long products
than after short ones, because ranks are not equally fast and the sending threads have slept meanwhile (decisions 0032, 0033)."""
ATTEMPTS = 4
"""Maximum number of attempts to measure collectives. There is another attempt while noise hides a collective, or a largest buffer takes no
longer than the smallest; the rounds of all attempts count."""
ELEMENT = 4
"""Bytes per element of the buffers of collectives: float32, which every backend can reduce."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: number of ``rounds``, microseconds per ``batch``, and the largest matrix product (rows), copy and buffer of a
    collective (both as powers of 2, in bytes)."""

    rounds: int
    batch: float
    product: int
    copy: int
    buffer: int


EFFORTS = {
    ("cpu", False): Effort(31, 1000.0, 512, 24, 24),
    ("cpu", True): Effort(21, 200.0, 256, 24, 20),
    ("cuda", False): Effort(21, 2000.0, 8192, 30, 28),
    ("cuda", True): Effort(11, 1000.0, 2048, 26, 24),
}


class Clock:
    """Times batches on ``device``; with a process group, all ranks start together and agree on the batch size."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort

    def measure(self, works: Sequence[Work]) -> list[float]:
        """Microseconds per call of each work, on the slowest rank."""
        counts = [self.count(work) for work in works]
        rounds = [[self._batch(work, n) / n for work, n in zip(works, counts, strict=True)] for _ in range(self.effort.rounds)]
        return self._slowest([min(times) for times in zip(*rounds, strict=True)])

    def some_rounds(self, works: Sequence[Work], count: int) -> list[list[float]]:
        """A quarter of the rounds: microseconds per call of each work in batches of ``count``, on this rank."""
        return [[self._batch(work, count) / count for work in works] for _ in range(max(3, self.effort.rounds // 4))]

    def medians(self, rounds: Sequence[Sequence[float]]) -> list[float]:
        """The median over rounds of each work, on the slowest rank."""
        return self._slowest([statistics.median(times) for times in zip(*rounds, strict=True)])

    def count(self, work: Work, batch: float | None = None) -> int:
        """The number of calls in a batch, of ``batch`` microseconds if given."""
        self._batch(work, 2)
        once = self._slowest([self._batch(work, 1)])[0]
        return max(1, min(1000, round((batch or self.effort.batch) / max(once, 0.1))))

    def _batch(self, work: Work, count: int) -> float:
        if dist.is_initialized():
            dist.barrier()
        self._finish()
        start = time.perf_counter()
        for _ in range(count):
            work()
        self._finish()
        return (time.perf_counter() - start) * 1e6

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, times: list[float]) -> list[float]:
        if not dist.is_initialized():
            return times
        everyone = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(everyone, dist.ReduceOp.MAX)
        return everyone.tolist()


@dataclass(frozen=True)
class Case:
    """An operator to measure, with the ``shapes`` of its operands and of its ``result``.

    ``name``: for the table of errors; ``op``: the operator that a plan prices; ``run``: the function that is timed; ``fitted``: whether the
    hardware is fitted to it, else it only checks the fit; ``rest``: the operator's arguments after the tensors.
    """

    name: str
    op: str
    run: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    fitted: bool
    rest: tuple[object, ...] = ()

    @property
    def call(self) -> Call:
        metas = tuple(TensorMeta(shape, self.dtype) for shape in self.shapes)
        return Call(self.op, (*map(Operand, range(len(metas))), *self.rest), (), metas, (TensorMeta(self.result, self.dtype),))


def measure_ops(clock: Clock) -> tuple[float, list[OpTime]]:
    """Microseconds of an operator without work, and the times of products of each dtype and copies (for fitting and checking) and of other
    operators (for checking)."""
    cases = [*_products(clock), *_copies(clock.effort), *_others(clock)]
    most: dict[torch.dtype, int] = {}
    for case in cases:
        most[case.dtype] = max(most.get(case.dtype, 1), _elements(case))
    pools = {dtype: torch.rand(count, device=clock.device).to(dtype) for dtype, count in most.items()}
    launch, *times = clock.measure([pools[torch.float32][:1].clone, *(_work(case, pools[case.dtype]) for case in cases)])
    return launch, [OpTime(case.name, case.call, t, case.fitted) for case, t in zip(cases, times, strict=True)]


def _products(clock: Clock) -> list[Case]:
    largest = clock.effort.product
    doubled = [n for n in (2**i for i in range(6, 20)) if n <= largest]
    out = []
    for dtype in DTYPES[clock.device.type]:
        name = f"product, {str(dtype).removeprefix('torch.')}"
        out += [_product(name, (n, n, n), dtype, True) for n in doubled]
        out += [_product(name, (3 * n // 4,) * 3, dtype, False) for n in doubled[1:]]
        thin = f"{name}, a dim of {largest // 16}"
        out += [_product(thin, (m, k, largest), dtype, False) for m, k in ((largest // 16, largest), (largest, largest // 16))]
    return out


def _product(name: str, size: tuple[int, int, int], dtype: torch.dtype, fitted: bool) -> Case:
    m, k, n = size
    return Case(name, "fxshard.einsum.default", torch.mm, ((m, k), (k, n)), (m, n), dtype, fitted, ("mk,kn->mn",))


def _copies(effort: Effort) -> list[Case]:
    """Copies of 4 KiB and more; every other one is for checking."""
    shapes = [(2**power // ELEMENT,) for power in range(12, effort.copy + 1)]
    return [Case("copy", COPY, torch.clone, (s,), s, torch.float32, i % 2 == 0 or i + 1 == len(shapes)) for i, s in enumerate(shapes)]


def _others(clock: Clock) -> list[Case]:
    """Attention in the device's usual dtype, and operators whose time should be that of moving their bytes."""
    out = []
    dtype = torch.float32 if clock.device.type == "cpu" else torch.bfloat16
    for length in (clock.effort.product // 4, clock.effort.product // 2):
        heads = (2, 8, length, 64)
        attention = torch.nn.functional.scaled_dot_product_attention
        out.append(Case("attention", "fxshard.sdpa.default", attention, (heads,) * 3, heads, dtype, False, (None, False, 0.0, None)))
    for power in range(13, clock.effort.copy, 3):
        s, rows = (2**power // ELEMENT,), (2 ** (power - 8) // ELEMENT, 256)
        out.append(Case("sum of two", "aten.add.Tensor", torch.add, (s, s), s, torch.float32, False))
        out.append(Case("gelu", "aten.gelu.default", torch.nn.functional.gelu, (s,), s, torch.float32, False))
        out.append(Case("sums of rows", "aten.sum.dim_IntList", lambda x: x.sum(1), (rows,), rows[:1], torch.float32, False, ((1,),)))
    return out


def _elements(case: Case) -> int:
    return sum(map(math.prod, case.shapes))


def _work(case: Case, pool: torch.Tensor) -> Work:
    """The call on consecutive parts of ``pool``."""
    parts = pool[: _elements(case)].split([math.prod(shape) for shape in case.shapes])
    operands = [part.view(shape) for part, shape in zip(parts, case.shapes, strict=True)]
    return lambda: case.run(*operands)


def measure_collectives(clock: Clock, device_mesh: DeviceMesh) -> list[CollectiveTime]:
    """Times each collective on each axis as lowered programs call it; buffers of 1 KiB and more, every other one for checking.

    Products run before and after each collective, as in a training step: the time is what the sequence takes beyond the products alone.
    """
    powers = range(10, clock.effort.buffer + 1)
    cases = [
        (kind, axis, 2**power, (i % 2 == 0 or i + 1 == len(powers)))
        for axis in range(device_mesh.ndim)
        for kind in COLLECTIVES
        for i, power in enumerate(powers)
        if device_mesh.size(axis) > 1
    ]
    pool = torch.zeros(  # zeros, because in-place sums would grow with every call
        2**clock.effort.buffer // ELEMENT + device_mesh.size(), device=clock.device
    )
    calls = [_collective(kind, size, device_mesh, axis, pool) for kind, axis, size, _ in cases]
    busy = _product_work(clock)
    beyond = _times_beyond(clock, busy, [partial(_one_after_another, busy, work) for work, _ in calls], len(powers))
    return [CollectiveTime(kind, axis, sent, t, fitted) for (kind, axis, _, fitted), (_, sent), t in zip(cases, calls, beyond, strict=True)]


def _times_beyond(clock: Clock, busy: Work, works: Sequence[Work], sizes: int) -> list[float]:
    """Microseconds that each work takes beyond ``busy``; MIN_TIME where noise still exceeds that after all attempts.

    ``works``: for each collective, its ``sizes`` measurements in ascending order of size.
    """
    rounds: list[list[float]] = []
    for _ in range(ATTEMPTS):
        rounds += clock.some_rounds([busy, *works], REPETITIONS)
        alone, *times = clock.medians(rounds)
        if min(times) - alone > MIN_TIME and all(times[i] < times[i + sizes - 1] for i in range(0, len(times), sizes)):
            break
    return [max(t - alone, MIN_TIME) for t in times]


def _product_work(clock: Clock) -> Work:
    """Matrix products that take about ``PRODUCTS_TIME``."""
    side = clock.effort.product // 2
    a, b, out = (torch.rand(side, side, device=clock.device) for _ in range(3))
    work = partial(torch.mm, a, b, out=out)
    count = clock.count(work, PRODUCTS_TIME)

    def products() -> None:
        for _ in range(count):
            work()

    return products


def _one_after_another(*works: Work) -> None:
    for work in works:
        work()


def _collective(kind: str, size: int, device_mesh: DeviceMesh, axis: int, pool: torch.Tensor) -> tuple[Work, int]:
    """The call on a buffer of about ``size`` bytes in ``pool``, and the bytes that a rank sends in a ring algorithm."""
    n, own = device_mesh.size(axis), device_mesh.get_group(axis)
    group, backend, wait = own.group_name, backend_name(own, pool.device), c10d.wait_tensor.default
    block = -(-size // (ELEMENT * n))  # elements; the buffer is n blocks
    buffer, piece = pool[: n * block].view(n, block), pool[:block].view(1, block)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: wait(c10d.all_reduce_.default(buffer, "sum", group)),  # in place, as Inductor emits it
        "all_gather": lambda: wait(c10d.all_gather_into_tensor.default(piece, n, group)),
        "reduce_scatter": lambda: reduce_scatter(buffer, "sum", n, group, backend),
        "all_to_all": lambda: wait(c10d.all_to_all_single.default(buffer, [1] * n, [1] * n, group)),
    }
    sent = (n - 1) * block * ELEMENT
    return calls[kind], 2 * sent if kind == "all_reduce" else sent
