"""Time of collectives by alpha-beta: hops times latency plus bytes over bandwidth, for the algorithm that is cheapest at the size.

An algorithm takes ``latency + per_byte x N`` for a buffer of N bytes (all-reduce: the tensor; all-gather: its result;
reduce-scatter: its operand; all-to-all: the local shard). On n ranks and one kind of link:

- ring (Thakur et al., 2005): all-reduce 2(n-1) hops and 2(n-1)/n N bytes; all-gather and reduce-scatter n-1 hops and (n-1)/n N;
  all-to-all n-1 messages, (n-1)/n N in total; a shift or zigzag 1 hop and N bytes, on the slowest link.
- double binary tree (Sanders, Speck, Träff, 2009), for all-reduce between nodes only: 2 ceil(log2 n) hops, 2 N bytes. Inside a node
  NCCL's tree is a chain and saves nothing.

A group with g ranks on each of m nodes, n = g m, can use a ring or tree through all ranks, with hops counted as NCCL's tuner does
(an all-reduce has 2(m-1) between nodes, the rest inside) and g rings or trees in parallel, one per rank's share of the network; or a
hierarchical algorithm: reduce-scatter inside nodes, all-reduce of N/g between them, all-gather inside (the others likewise; all-to-all
inside, then between). Plans always report the bytes of the ring (``redistribution.sent_bytes``).
A measured curve of such a group takes precedence over the model; ``Measured.efficiency`` scales the links of the model.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from fxshard.cost.compute import traffic_time
from fxshard.cost.nccl import nccl_times
from fxshard.layout.redistribution import COLLECTIVES, Price, Step
from fxshard.mesh.hardware import Curve, Efficiency, Link
from fxshard.mesh.mesh import Mesh, Span

ROWS = ("dispatch", "combine")
"""All-to-alls of rows of experts, with the time of a plain one."""
EXCHANGES = ("shift", "zigzag")
"""Collectives in which each rank sends its buffer to one or two others."""
MAX_BYTES = 1 << 50
"""Upper bound on the bytes that a collective sends."""
LOCAL_STEP = 0.1
"""Microseconds charged to a slice or mask in addition to its bytes: it usually fuses, but is not free."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of a collective: ``latency`` in microseconds, ``per_byte`` in microseconds per byte of the buffer."""

    name: str
    latency: float
    per_byte: float

    def time(self, size: float) -> float:
        return self.latency + self.per_byte * size


def hops(kind: str, n: int) -> int:
    """Hops of a ring collective on ``n`` ranks."""
    if kind in EXCHANGES:
        return 1
    return 2 * (n - 1) if kind == "all_reduce" else n - 1


def sent_fraction(kind: str, n: int) -> float:
    """Bytes that a rank sends in a ring collective, per byte of the buffer."""
    if kind in EXCHANGES:
        return 1.0
    return hops(kind, n) / n


def algorithms(kind: str, span: Span, inside: Link, between: Link | None) -> tuple[Algorithm, ...]:
    """The algorithms of a collective on groups placed as in ``span``; ``between`` may be None for groups inside nodes."""
    if span.is_inside:
        return (_ring(kind, span.size, inside),)
    assert between is not None, "Mesh has checked its links"
    if span.per_node is None or span.per_node == 1:
        return _one_rank_per_node(kind, span.size, between)
    return _multi_node(kind, span.per_node, span.size // span.per_node, inside, between)


def _ring(kind: str, n: int, link: Link) -> Algorithm:
    return Algorithm("ring", hops(kind, n) * link.latency, sent_fraction(kind, n) / link.bandwidth * 1e6)


def _one_rank_per_node(kind: str, n: int, link: Link) -> tuple[Algorithm, ...]:
    """Algorithms for ``n`` ranks, each on another node."""
    tree = Algorithm("tree", 2 * _depth(n) * link.latency, 2 / link.bandwidth * 1e6)
    return (_ring(kind, n, link), tree) if kind == "all_reduce" else (_ring(kind, n, link),)


def _depth(n: int) -> int:
    return (n - 1).bit_length()


def _multi_node(kind: str, g: int, m: int, inside: Link, between: Link) -> tuple[Algorithm, ...]:
    """Algorithms for ``g`` ranks on each of ``m`` nodes."""
    n, together = g * m, 1e6 / min(inside.bandwidth, g * between.bandwidth)
    outer = _one_rank_per_node(kind, m, between)
    if kind == "all_to_all":
        latency = (g - 1) * inside.latency + (n - g) * between.latency
        straight = Algorithm("ring", latency, max((g - 1) / inside.bandwidth, (n - g) / between.bandwidth) / n * 1e6)
        return straight, *(_hierarchical(_ring(kind, g, inside), o, 1) for o in outer)
    if kind in EXCHANGES:
        return (Algorithm("ring", max(inside.latency, between.latency), 1e6 / min(inside.bandwidth, between.bandwidth)),)
    latency = hops(kind, m) * between.latency + (hops(kind, n) - hops(kind, m)) * inside.latency
    found = [Algorithm("ring", latency, sent_fraction(kind, n) * together)]
    if kind == "all_reduce":
        found.append(Algorithm("tree", 2 * ((g - 1) * inside.latency + _depth(m) * between.latency), 2 * together))
    return *found, *(_hierarchical(_ring(kind, g, inside), o, g) for o in outer)


def _hierarchical(inner: Algorithm, outer: Algorithm, parts: int) -> Algorithm:
    """``inner`` inside nodes, then ``outer`` between them on a buffer ``parts`` times smaller."""
    return Algorithm(f"hierarchical, {outer.name}", inner.latency + outer.latency, inner.per_byte + outer.per_byte / parts)


@lru_cache(maxsize=1024)
def time_by_bytes(mesh: Mesh, kind: str, axis: int) -> Callable[[float], float]:
    """Function from the bytes that each rank sends on ``axis`` to microseconds: the measured curve of such groups, else the model."""
    kind = "all_to_all" if kind in ROWS else kind
    span, h = mesh.span(axis), mesh.hardware
    if mesh.axis_names[axis] in h.axes or span.per_node is None:
        return modelled_time_by_bytes(mesh, kind, axis)
    return h.measured.collectives.get((kind, span.size, span.stride)) or modelled_time_by_bytes(mesh, kind, axis)


def modelled_time_by_bytes(mesh: Mesh, kind: str, axis: int) -> Callable[[float], float]:
    """Function from the bytes that each rank sends to the microseconds of the cheapest algorithm."""
    span, h = mesh.span(axis), mesh.hardware
    own = h.axes.get(mesh.axis_names[axis])
    if own is None and h.reached is not None and kind not in EXCHANGES:
        times = tuple(nccl_times(kind, span, h.inside, h.between, h.reached).values())
        return _sampled(times, sent_fraction(kind, span.size), h.launch, h.measured.efficiency.get(kind, Efficiency()))
    if own is None:
        found = algorithms(kind, span, h.inside, h.between)
    else:
        found = (_ring(kind, span.size, own),) if span.is_inside else _one_rank_per_node(kind, span.size, own)
    reached = Efficiency() if own else h.measured.efficiency.get(kind, Efficiency())
    lines = [(h.launch + f.latency * reached.latency, f.per_byte / reached.bandwidth / sent_fraction(kind, span.size)) for f in found]
    return lambda sent: min(start + slope * sent for start, slope in lines)


def _sampled(times: tuple[Callable[[float], float], ...], fraction: float, launch: float, reached: Efficiency) -> Curve:
    """The shortest of ``times`` over the bytes that a rank sends, ``launch`` included, as a curve through half powers of two."""
    buffers = [2 ** (k / 2) for k in range(2 * MAX_BYTES.bit_length())]
    sizes = sorted({0, *(round(size * fraction) for size in buffers)})
    fastest = [min(time(size / fraction) for time in times) for size in sizes]
    raw = [launch + fastest[0] * reached.latency + (time - fastest[0]) / reached.bandwidth for time in fastest]
    return Curve(tuple(zip(sizes, accumulate(raw, max), strict=True)))


def collective_time(kind: str, axis: int, sent: int, mesh: Mesh) -> float:
    """Microseconds of one collective in which each rank sends ``sent`` bytes (of the ring algorithm) on mesh axis ``axis``."""
    return time_by_bytes(mesh, kind, axis)(sent) if mesh.shape[axis] > 1 else 0.0


def packing_time(kind: str, axis: int, sent: int, mesh: Mesh) -> float:
    """Microseconds to pack a collective's operand into a bucket and, for an all-gather, to unpack its result.

    An all-reduce needs neither: its operand is computed in the bucket and its result read there (decision 0034).
    """
    n = mesh.shape[axis]
    if n == 1 or kind == "all_reduce":
        return 0.0
    buffer = sent / (n - 1) if kind == "all_gather" else sent / sent_fraction(kind, n)
    return traffic_time(mesh.hardware, int(2 * buffer * (1 + n * (kind == "all_gather"))))


def copies_time(written: int, mesh: Mesh) -> float:
    """Microseconds of the copies around a collective that write so many bytes, and read as many."""
    return traffic_time(mesh.hardware, 2 * written) if written else 0.0


FULL_BUCKET_LATENCIES = 10
"""A bucket is full at this many latencies: one more latency adds little, and smaller buckets overlap better with compute."""


def full_bucket(kind: str, axis: int, mesh: Mesh) -> int:
    """Bytes that each rank sends in a collective that takes ``FULL_BUCKET_LATENCIES`` latencies; 0 if there is no latency."""
    time = time_by_bytes(mesh, kind, axis)
    full = FULL_BUCKET_LATENCIES * time(0)
    return bisect.bisect_left(range(MAX_BYTES), full, key=time) if full > 0 else 0


@lru_cache(maxsize=64)
def bucketing_saving(mesh: Mesh) -> Price:
    """Microseconds that a collective saves in a bucket: its time alone, copies included, less its share of a full bucket and its packing,
    which takes the place of these copies; at least 0."""
    full = {(kind, axis): full_bucket(kind, axis, mesh) for kind in COLLECTIVES for axis, n in enumerate(mesh.shape) if n > 1}

    def price(step: Step, sent: int, written: int) -> float:
        whole = full.get((step.kind, step.axis))
        if not whole or sent >= whole:
            return 0.0
        alone, bucket = (collective_time(step.kind, step.axis, size, mesh) for size in (sent, whole))
        alone += copies_time(written, mesh)
        return max(0.0, alone - bucket * sent / whole - packing_time(step.kind, step.axis, sent, mesh))

    return price


@lru_cache(maxsize=64)
def time_price(mesh: Mesh) -> Price:
    """The price of redistribution steps in microseconds on ``mesh``: of a collective with its copies, of a local step by what it writes."""

    times = {(kind, axis): time_by_bytes(mesh, kind, axis) for kind in COLLECTIVES for axis, n in enumerate(mesh.shape) if n > 1}

    def price(step: Step, sent: int, written: int) -> float:
        if step.is_collective:
            time = times.get((step.kind, step.axis))
            return time(sent) + copies_time(written, mesh) if time else 0.0
        return LOCAL_STEP + traffic_time(mesh.hardware, written)

    return price
