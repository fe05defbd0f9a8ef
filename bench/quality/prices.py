"""Prices of kernels and collectives, written from docs/hardware.md and its sources, without the code under test.

Times are microseconds, sizes bytes, rates bytes or FLOPs per microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

NODE = 8
"""Devices of a node."""
LAUNCH, KERNEL, SLICE = 3.0, 2.0, 0.1
"""Of a collective; from the end of one kernel to the work of the next; a slice or mask beyond its bytes."""
OVERLAP = 0.84
"""The part of overlapped communication that is free (Lee et al., arXiv 2507.03114)."""
SUSTAINED, TILE, STEP, THIN, HALF_LENGTH = 0.67, 128, 128, 64, 512
NETWORK, FILL, FILL_BYTES, SWITCH_HOP = 0.94, 0.75, 1.5 * 2**20, 33.0
"""The fitted constants of docs/hardware.md: part of a card's line rate, NVLS's and rings' first bytes, a hop of NVLS with a tree."""
CORRECTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9),
)
"""NCCL 2.28, src/graph/tuning.cc, treeCorrectionFactor: of LL, LL128 and Simple, at 64 bytes and each power of two to 128 MiB."""


@dataclass(frozen=True)
class Device:
    """A preset: data sheet rates, the parts of them that kernels reach, and NCCL's constants of the generation (GB/s; nodes 1, 2, more)."""

    matrix: dict[int, float]
    memory: float
    inside: float
    card: float
    best: float
    attention: tuple[float, float]
    processors: int
    low_latency: tuple[float, float, float]
    tree: tuple[float, float, float]
    tree128: tuple[float, float, float]
    switch: float


DEVICES = {
    "a100": Device(
        {2: 312e6, 4: 19.5e6}, 2.0e6 * 0.88, 240e3, 25e3, 0.869, (0.73, 0.63), 108, (87.7, 39, 20.4), (24, 23.6, 17.8), (20, 20, 20), 0
    ),
    "h100": Device(
        {2: 989e6, 4: 67e6}, 3.35e6 * 0.9, 370e3, 50e3, 0.803, (0.4, 0.33), 132, (141, 39, 20.4), (38.7, 41.4, 36), (36.7, 36.7, 29), 480
    ),
    "b200": Device(
        {2: 2250e6, 4: 80e6}, 8.0e6 * 0.9, 740e3, 50e3, 0.776, (0.4, 0.33), 148, (282, 39, 20.4), (70, 42.8, 24), (55.6, 31.67, 20), 840
    ),
}


def product_time(on: Device, itemsize: int, batch: int, m: int, n: int, k: int) -> float:
    """``batch`` products of m x n x k in tiles: half a wave of them idles at the end, each starts with 128 columns of k, and k is split if
    there are fewer tiles than processors."""
    area, wave = batch * max(m, THIN) * max(n, THIN), on.processors * TILE**2 / 2
    parts = max(1.0, math.sqrt(wave * k / (area * STEP))) if area else 1.0
    return 2 * (area + wave / parts) * (k + parts * STEP) / (on.matrix[itemsize] * on.best * SUSTAINED)


def arithmetic_time(on: Device, itemsize: int, flops: float) -> float:
    """Convolutions and products whose shape is not looked at."""
    return flops / (on.matrix[itemsize] * on.best * SUSTAINED)


def attention_time(on: Device, itemsize: int, flops: float, length: int, backward: bool) -> float:
    reached = on.attention[backward] if itemsize <= 2 else on.best
    return flops / on.matrix[itemsize] / reached * (1 + HALF_LENGTH / length if itemsize <= 2 else 1.0)


@dataclass(frozen=True)
class Group:
    """A collective's ranks: ``inside`` of them on each of ``nodes`` nodes."""

    inside: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes


def group_of(shape: tuple[int, ...], axis: int) -> Group:
    """The groups of a mesh axis; consecutive ranks fill nodes. Sizes are powers of two, as in ``bench.quality``."""
    stride, total = math.prod(shape[axis + 1 :]), math.prod(shape)
    within = min(shape[axis], max(1, min(NODE, total) // stride))
    return Group(within, shape[axis] // within)


def collective_time(on: Device, kind: str, group: Group, size: float) -> float:
    """NCCL's tuner: the least of all algorithms and protocols on a buffer of ``size`` bytes (what an all-reduce reduces, an all-gather
    gathers, a reduce-scatter scatters, a rank holds in an all-to-all). A shift is one hop of all of it."""
    if kind == "all_to_all":
        return LAUNCH + _exchange(on, group, size)
    if kind == "shift":
        return LAUNCH + (1.9 if group.nodes == 1 else 4.0) + size / (on.inside if group.nodes == 1 else on.card)
    found = min(_rings(on, kind, group, size))
    if kind == "all_reduce":
        parts = sum(min(_rings(on, one, group, size)) for one in ("reduce_scatter", "all_gather")) + LAUNCH
        found = min(found, *_trees(on, group, size), *_switch(on, group, size), parts)
    return LAUNCH + found


def _away(on: Device) -> float:
    return on.card * NETWORK


def _bus(on: Device, group: Group) -> float:
    """Bytes per microsecond through a ring: NVLink's, or as many cards as ranks leave a node."""
    if group.nodes == 1:
        return on.inside
    cards = group.inside * _away(on)
    return cards if group.inside == 1 else min(on.inside, cards)


def _filled(group: Group, size: float, fill: float = FILL) -> float:
    """``size``, and more for the first bytes, whose chunks do not fill the pipeline."""
    return size + fill * min(size, FILL_BYTES * group.ranks)


def _rings(on: Device, kind: str, group: Group, size: float) -> Iterator[float]:
    turns = 2 if kind == "all_reduce" else 1
    steps, outer = turns * (group.ranks - 1), turns * (group.nodes - 1)
    network = (5.0, 8.5, 14.0) if group.inside == 1 else (2.7, 4.0, 14.0)
    base, nvlink = (6.6, 14.0, 8.4), (0.6, 1.9, 3.4)
    bus, low = _bus(on, group), on.low_latency[min(group.nodes, 3) - 1] * 1e3
    fill = FILL / 3 if group.inside == 1 < group.nodes else FILL
    for protocol, rate in enumerate((min(bus / 2, low), bus * 0.92, bus)):
        start = base[protocol] + (steps - outer) * nvlink[protocol] + outer * network[protocol]
        moved = size if protocol == 0 else _filled(group, size, fill)
        yield start + moved * steps / group.ranks / rate


def _trees(on: Device, group: Group, size: float) -> Iterator[float]:
    if group.nodes == 1:
        return
    nodes, cards = min(group.nodes, 3) - 1, max(group.inside, 2)
    plain = min(_bus(on, group) * 0.92, cards * on.tree[nodes] * 1e3)
    rates = min(plain / 3.8, on.low_latency[nodes] * 1e3), min(plain * 0.9375, cards * on.tree128[nodes] * 1e3), plain
    depth = math.ceil(math.log2(group.nodes))
    for protocol, rate in enumerate(rates):
        hops = (group.inside - 1) * (0.6, 1.25, 4.0)[protocol] + depth * (5.0, 8.5, 14.0)[protocol]
        yield (6.8, 14.0, 8.4)[protocol] + 2 * hops + 2 * size / (rate * 0.85 * _correction(protocol, size))


def _correction(protocol: int, size: float) -> float:
    table = CORRECTION[protocol]
    at = min(max(math.log2(max(size, 1)) - 6, 0), len(table) - 1)
    low = min(int(at), len(table) - 2)
    return table[low] * (table[low + 1] / table[low]) ** (at - low)


def _switch(on: Device, group: Group, size: float) -> Iterator[float]:
    """NVLink's switch reduces for three and more ranks of a node; between nodes with a tree."""
    if group.inside < 3 or not on.switch:
        return
    rate, start = on.switch * 1e3 * 8 / 14, 25.0
    if group.nodes > 1:
        start += 2 * math.ceil(math.log2(group.nodes)) * SWITCH_HOP
        share = 1.0 if group.nodes == 2 else group.ranks / (2 * (group.ranks - 1))
        rate = min(rate, group.inside * _away(on) * share)
    yield start + _filled(group, size) / rate


def _exchange(on: Device, group: Group, size: float) -> float:
    away = group.ranks - group.inside
    start = 8.4 + (14.0 + away if away else 3.4)
    return start + max((group.inside - 1) / on.inside, away / _away(on)) * size / group.ranks
