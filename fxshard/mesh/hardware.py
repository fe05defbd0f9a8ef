"""What a mesh stands on: the speeds of one kind of device and of its links, as vendors state them or as they were measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """What one rank sends over: ``bandwidth`` in bytes per second, ``latency`` in microseconds per hop.

    The bandwidth is what each rank has while all ranks of a node send: with one network card per device (HGX) that is a
    card's, with fewer cards than devices a rank's share of them.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Curve:
    """Measured microseconds over a size: ``points`` are (size, time), two at least; sizes ascend, times do not fall.

    Straight lines between points; outside of them alpha-beta: a line whose slope is that from the first point to the last.
    """

    points: tuple[tuple[int, float], ...]

    def __call__(self, size: float) -> float:
        """Microseconds at ``size``, never less than at a smaller one."""
        first, last = self.points[0], self.points[-1]
        if size < first[0]:
            return max(0.0, first[1] - _slope(first, last) * (first[0] - size))
        if size >= last[0]:
            return last[1] + _slope(first, last) * (size - last[0])
        at = bisect_right(self.points, (size, float("inf")))
        before, after = self.points[at - 1], self.points[at]
        return min(after[1], before[1] + _slope(before, after) * (size - before[0]))


def _slope(start: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


@dataclass(frozen=True)
class Efficiency:
    """Of a kind of collective: ``latency`` times as much latency as the links have, and ``bandwidth`` times as much bandwidth."""

    latency: float = 1.0
    bandwidth: float = 1.0


@dataclass(frozen=True)
class Measured:
    """Curves that say more than a rate; where there is none, the rates of ``Hardware`` hold.

    ``products``: by the name of a dtype (``"bfloat16"``), time of a matrix product over its FLOPs, without the launch.
    ``copy``: time over the bytes read and written, without the launch. ``collectives``: by kind, size and stride of a
    group (``("all_reduce", 4, 2)``: four ranks, two ranks apart), time over the bytes that a rank sends, launch included,
    while all groups of that kind communicate. ``efficiency``: by kind, what a collective reaches of the links' latency and
    bandwidth, for groups that were not measured.
    """

    products: Mapping[str, Curve] = field(default_factory=dict)
    copy: Curve | None = None
    collectives: Mapping[tuple[str, int, int], Curve] = field(default_factory=dict)
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its network.

    ``flops``: FLOP per second by element size in bytes; ``memory_bandwidth``: bytes per second; ``launch``: microseconds
    per kernel; ``node_size``: devices that ``inside`` joins, beyond it ``between`` is the slowest link (None: not known);
    ``axes``: links of single mesh axes by name, in place of those two; ``measured``: curves in place of rates; ``overlap``: 0 to 1,
    the part of a collective's time that costs nothing while an operator runs beside it, the rest being what they take from each other.
    """

    name: str
    flops: Mapping[int, float] = field(hash=False)
    memory_bandwidth: float
    launch: float
    node_size: int
    inside: Link
    between: Link | None
    axes: Mapping[str, Link] = field(default_factory=dict, hash=False)
    measured: Measured = field(default=Measured(), hash=False)
    overlap: float = 0.0


# Beside communication, operators on A100 and H100 were found to run 18.9 % slower on average (Lee et al., arXiv 2507.03114): in the time
# of a collective they do 1 / 1.189 of what they would do alone. On a CPU gloo's threads need the cores that compute.
OVERLAP = round(1 / 1.189, 2)

# Dense rates from the vendors' data sheets; links are effective rates of NCCL's ring, latencies its tuner's per-hop constants.
# The cpu row is one core with gloo over loopback, rounded from a measurement: 42 GFLOP/s in float32, 13 GB/s in a copy, and
# for two ranks an all-reduce of 0.19 ms and 1 GB/s.
HARDWARE = {
    h.name: h
    for h in (
        Hardware("h100", {1: 1979e12, 2: 989e12, 4: 67e12, 8: 34e12}, 3.35e12, 3.0, 8, Link(370e9, 1.9), Link(50e9, 4.0), overlap=OVERLAP),
        Hardware("h200", {1: 1979e12, 2: 989e12, 4: 67e12, 8: 34e12}, 4.8e12, 3.0, 8, Link(370e9, 1.9), Link(50e9, 4.0), overlap=OVERLAP),
        Hardware("a100", {1: 624e12, 2: 312e12, 4: 19.5e12, 8: 9.7e12}, 2.0e12, 3.0, 8, Link(240e9, 1.9), Link(25e9, 4.0), overlap=OVERLAP),
        Hardware("b200", {1: 4500e12, 2: 2250e12, 4: 80e12, 8: 40e12}, 8.0e12, 3.0, 8, Link(740e9, 1.9), Link(50e9, 4.0), overlap=OVERLAP),
        Hardware("cpu", {1: 50e9, 2: 50e9, 4: 50e9, 8: 25e9}, 10e9, 3.0, 64, Link(2e9, 50.0), Link(1e9, 100.0)),
    )
}
