"""Hardware: the speeds of one kind of device and of its links, from vendors' data sheets or from measurements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxshard.mesh.architectures import ARCHITECTURES, Architecture


@dataclass(frozen=True)
class Link:
    """A network link of one rank: ``bandwidth`` in bytes per second, ``latency`` in microseconds per hop.

    The bandwidth is what one rank gets while all ranks of its node send: that of a whole network card if each device has
    one (HGX), else the rank's share of the cards.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Curve:
    """Measured microseconds by size: ``points`` are at least two (size, time), with increasing sizes and non-decreasing times.

    Interpolates linearly between points; extrapolates with the slope of the line from the first point to the last (alpha-beta).
    """

    points: tuple[tuple[int, float], ...]

    def __call__(self, size: float) -> float:
        """Microseconds at ``size``; never decreases as ``size`` grows."""
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
    """Factors by which one kind of collective scales the links' ``latency`` and ``bandwidth``."""

    latency: float = 1.0
    bandwidth: float = 1.0


@dataclass(frozen=True)
class Measured:
    """Measured curves, which take precedence over the constant rates of ``Hardware``.

    ``products``: time of a matrix product as a function of its FLOP, without the launch, by dtype name (``"bfloat16"``).
    ``copy``: time as a function of the bytes read and written, without the launch. ``collectives``: time as a function of the bytes
    that a rank sends, launch included, while all groups of that kind communicate; by kind, size and stride of the group
    (``("all_reduce", 4, 2)``: four ranks, two ranks apart). ``efficiency``: by kind of collective, how it scales the links'
    latency and bandwidth in groups that were not measured.
    """

    products: Mapping[str, Curve] = field(default_factory=dict)
    copy: Curve | None = None
    collectives: Mapping[tuple[str, int, int], Curve] = field(default_factory=dict)
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its network.

    ``flops``: FLOP per second by element size in bytes; ``memory_bandwidth``: bytes per second; ``launch``: microseconds
    per kernel launch; ``node_size``: devices per node; ``inside``: the link between devices of one node; ``between``: the link between
    nodes (None: unknown); ``axes``: links of single mesh axes by name, which replace those two; ``measured``: curves that replace rates;
    ``overlap``: 0 to 1, the part of a collective's time that is free while operators run beside it; the rest slows them down.
    ``host``: the link to the memory of the host, its bandwidth in each direction, its latency per copy (None: unknown).
    ``memory``: bytes of a device (None: unknown); plans keep to a ``memory_limit`` only, and say if they need more than this.
    ``architecture``: a key of ``mesh.architectures.ARCHITECTURES``, which says what kernels reach of these rates and how long NCCL's
    collectives take; empty: kernels reach all of them, and collectives take ``latency + bytes / bandwidth``.
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
    host: Link | None = None
    architecture: str = ""
    memory: float | None = None

    @property
    def reached(self) -> Architecture | None:
        """What its kernels and collectives reach; None without an ``architecture``."""
        return ARCHITECTURES[self.architecture] if self.architecture else None


# On A100 and H100, operators run 18.9 % slower on average beside communication (Lee et al., arXiv 2507.03114): during a collective they
# do 1 / 1.189 of the work that they would do alone. A CPU has no overlap: gloo's threads need the cores that compute.
OVERLAP = round(1 / 1.189, 2)

# FLOP rates are dense ones, memory and its bandwidths those of the vendors' data sheets; ``architecture`` says what of the rates is
# reached. Links: bandwidths inside a node are bus bandwidths of NCCL's ring on large buffers (nccl-tests on 8 H200: 361 GB/s of an
# all-gather and a reduce-scatter of 16 GiB, ml-engineering, network/benchmarks), between nodes line rates of one network card for each
# device (400 Gb/s; A100: 200). Their latencies are those of NCCL's ring in LL128; with an architecture, NCCL's constants replace them. The
# cpu row is one core with gloo over loopback, rounded from a measurement: 42 GFLOP/s in float32, copies at 13 GB/s, an all-reduce of two
# ranks at 0.19 ms and 1 GB/s. Host links are what copies of pinned memory reach of PCIe x16 in one direction: about 25 of 31.5 GB/s for
# generation 4 (a100), 55 of 63 for generation 5 (the others), with about 10 us per copy; for the cpu, a copy within memory.
PCIE4, PCIE5, COPY = Link(25e9, 10.0), Link(55e9, 10.0), Link(10e9, 3.0)
HOPPER_FLOPS = {1: 1979e12, 2: 989e12, 4: 67e12, 8: 34e12}
HOPPER_LINKS = Link(370e9, 1.9), Link(50e9, 4.0)
HARDWARE = {
    h.name: h
    for h in (
        Hardware("h100", HOPPER_FLOPS, 3.35e12, 3.0, 8, *HOPPER_LINKS, overlap=OVERLAP, host=PCIE5, architecture="hopper", memory=80e9),
        Hardware("h200", HOPPER_FLOPS, 4.8e12, 3.0, 8, *HOPPER_LINKS, overlap=OVERLAP, host=PCIE5, architecture="hopper", memory=141e9),
        Hardware(
            "a100",
            {1: 624e12, 2: 312e12, 4: 19.5e12, 8: 9.7e12},
            2.0e12,
            3.0,
            8,
            Link(240e9, 1.9),
            Link(25e9, 4.0),
            overlap=OVERLAP,
            host=PCIE4,
            architecture="ampere",
            memory=80e9,
        ),
        Hardware(
            "b200",
            {1: 4500e12, 2: 2250e12, 4: 80e12, 8: 40e12},
            8.0e12,
            3.0,
            8,
            Link(740e9, 1.9),
            Link(50e9, 4.0),
            overlap=OVERLAP,
            host=PCIE5,
            architecture="blackwell",
            memory=180e9,
        ),
        Hardware("cpu", {1: 50e9, 2: 50e9, 4: 50e9, 8: 25e9}, 10e9, 3.0, 64, Link(2e9, 50.0), Link(1e9, 100.0), host=COPY),
    )
}
