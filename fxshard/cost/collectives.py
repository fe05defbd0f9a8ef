"""Collectives by alpha-beta: hops times latency plus bytes over bandwidth, in the form that is cheapest for the size.

A form is a line, ``latency + per_byte x N`` for a buffer of N bytes (what all-reduce reduces, all-gather gathers,
reduce-scatter scatters, all-to-all holds on a rank). On n ranks and one kind of link:

- ring (Thakur et al., 2005): all-reduce 2(n-1) hops and 2(n-1)/n N; all-gather, reduce-scatter n-1 and (n-1)/n N; all-to-all
  sends n-1 messages, (n-1)/n N together.
- double binary tree (Sanders, Speck, Träff, 2009), all-reduce between nodes only: 2 ceil(log2 n) hops, 2 N. Inside a node NCCL's
  tree is a chain and saves nothing.

A group with g ranks in each of m nodes, n = g m, has the ring and tree through all of them, with the hops of either kind counted
as NCCL's tuner does (2(m-1) of an all-reduce's between nodes, the rest inside) and g rings or trees at once, one per rank's share
of the network; and the hierarchical form: reduce-scatter inside, all-reduce of N/g between, all-gather inside (likewise the others,
an all-to-all inside and then between). Bytes that plans report stay those of the ring (``redistribution.sent_bytes``).
Where the hardware holds a measurement of such a group, that is the time; where it says what a kind of collective reaches of the
links (``Measured.efficiency``), forms take that.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fxshard.cost.compute import traffic_time
from fxshard.layout.redistribution import COLLECTIVES, Price, Step
from fxshard.mesh.hardware import Efficiency, Link
from fxshard.mesh.mesh import Mesh, Span

LOCAL_STEP = 0.1
"""Microseconds charged to a slice or a mask beside its bytes: it usually fuses, but is not nothing."""


@dataclass(frozen=True)
class Form:
    """One way to run a collective: ``latency`` in microseconds, ``per_byte`` in microseconds per byte of the buffer."""

    name: str
    latency: float
    per_byte: float

    def time(self, size: float) -> float:
        return self.latency + self.per_byte * size


def hops(kind: str, n: int) -> int:
    """Latency terms of a ring collective on ``n`` ranks."""
    return 2 * (n - 1) if kind == "all_reduce" else n - 1


def share(kind: str, n: int) -> float:
    """Bytes that a rank sends in a ring collective, per byte of the buffer."""
    return hops(kind, n) / n


def forms(kind: str, span: Span, inside: Link, between: Link | None) -> tuple[Form, ...]:
    """The forms of a collective on groups that lie as ``span`` says; ``between`` may be None for groups inside nodes."""
    if span.is_inside:
        return (_ring(kind, span.size, inside),)
    assert between is not None, "Mesh has checked its links"
    if span.per_node is None or span.per_node == 1:
        return _flat(kind, span.size, between)
    return _across(kind, span.per_node, span.size // span.per_node, inside, between)


def _ring(kind: str, n: int, link: Link) -> Form:
    return Form("ring", hops(kind, n) * link.latency, share(kind, n) / link.bandwidth * 1e6)


def _flat(kind: str, n: int, link: Link) -> tuple[Form, ...]:
    """Ranks in nodes of their own."""
    tree = Form("tree", 2 * _depth(n) * link.latency, 2 / link.bandwidth * 1e6)
    return (_ring(kind, n, link), tree) if kind == "all_reduce" else (_ring(kind, n, link),)


def _depth(n: int) -> int:
    return (n - 1).bit_length()


def _across(kind: str, g: int, m: int, inside: Link, between: Link) -> tuple[Form, ...]:
    """``g`` ranks in each of ``m`` nodes."""
    n, together = g * m, 1e6 / min(inside.bandwidth, g * between.bandwidth)
    outer = _flat(kind, m, between)
    if kind == "all_to_all":
        latency = (g - 1) * inside.latency + (n - g) * between.latency
        straight = Form("ring", latency, max((g - 1) / inside.bandwidth, (n - g) / between.bandwidth) / n * 1e6)
        return straight, *(_after(_ring(kind, g, inside), o, 1) for o in outer)
    latency = hops(kind, m) * between.latency + (hops(kind, n) - hops(kind, m)) * inside.latency
    found = [Form("ring", latency, share(kind, n) * together)]
    if kind == "all_reduce":
        found.append(Form("tree", 2 * ((g - 1) * inside.latency + _depth(m) * between.latency), 2 * together))
    return *found, *(_after(_ring(kind, g, inside), o, g) for o in outer)


def _after(inner: Form, outer: Form, parts: int) -> Form:
    """``inner`` inside nodes and ``outer`` between them on a buffer that is ``parts`` times smaller."""
    return Form(f"hierarchical, {outer.name}", inner.latency + outer.latency, inner.per_byte + outer.per_byte / parts)


@lru_cache(maxsize=1024)
def timing(mesh: Mesh, kind: str, axis: int) -> Callable[[float], float]:
    """Microseconds of a collective on ``axis`` by the bytes that each rank sends: as measured on such groups, else by the formula."""
    span, h = mesh.span(axis), mesh.hardware
    if mesh.axis_names[axis] in h.axes or span.per_node is None:
        return formula(mesh, kind, axis)
    return h.measured.collectives.get((kind, span.size, span.stride)) or formula(mesh, kind, axis)


def formula(mesh: Mesh, kind: str, axis: int) -> Callable[[float], float]:
    """Microseconds of the cheapest form by the bytes that each rank sends."""
    span, h = mesh.span(axis), mesh.hardware
    own = h.axes.get(mesh.axis_names[axis])
    if own is None:
        found = forms(kind, span, h.inside, h.between)
    else:
        found = (_ring(kind, span.size, own),) if span.is_inside else _flat(kind, span.size, own)
    reached = Efficiency() if own else h.measured.efficiency.get(kind, Efficiency())
    lines = [(h.launch + f.latency * reached.latency, f.per_byte / reached.bandwidth / share(kind, span.size)) for f in found]
    return lambda sent: min(start + slope * sent for start, slope in lines)


def collective_time(kind: str, axis: int, sent: int, mesh: Mesh) -> float:
    """Microseconds of one collective in which each rank sends ``sent`` bytes (those of the ring form) on mesh axis ``axis``."""
    return timing(mesh, kind, axis)(sent) if mesh.shape[axis] > 1 else 0.0


def packing_time(kind: str, axis: int, sent: int, mesh: Mesh) -> float:
    """Microseconds of packing a collective's buffer with others' and, where its result lies in pieces, of taking that apart.

    What is all-reduced is computed in the buffer and read there (decision 0034).
    """
    n = mesh.shape[axis]
    if n == 1 or kind == "all_reduce":
        return 0.0
    buffer = sent / (n - 1) if kind == "all_gather" else sent / share(kind, n)
    return traffic_time(mesh.hardware, int(2 * buffer * (1 + n * (kind == "all_gather"))))


LARGEST = 1 << 50
"""Bytes that no collective sends."""
FULL = 10
"""Collectives are joined until they take so many starts: another start is little beside that, and a bucket runs while others are filled."""


def full_bucket(kind: str, axis: int, mesh: Mesh) -> int:
    """Bytes that each rank sends in a collective that takes ``FULL`` starts; 0 where starting costs nothing."""
    time = timing(mesh, kind, axis)
    full = FULL * time(0)
    return bisect.bisect_left(range(LARGEST), full, key=time) if full > 0 else 0


@lru_cache(maxsize=64)
def bucketing_saving(mesh: Mesh) -> Price:
    """What a collective on ``mesh`` costs less in a bucket: what it takes beyond its share of a full one and its packing, if anything."""
    full = {(kind, axis): full_bucket(kind, axis, mesh) for kind in COLLECTIVES for axis, n in enumerate(mesh.shape) if n > 1}

    def price(step: Step, sent: int, written: int) -> float:
        whole = full.get((step.kind, step.axis))
        if not whole or sent >= whole:
            return 0.0
        alone, bucket = (collective_time(step.kind, step.axis, size, mesh) for size in (sent, whole))
        return max(0.0, alone - bucket * sent / whole - packing_time(step.kind, step.axis, sent, mesh))

    return price


@lru_cache(maxsize=64)
def time_price(mesh: Mesh) -> Price:
    """The price of redistribution steps in microseconds on ``mesh``; a local step costs the bytes that it writes."""

    times = {(kind, axis): timing(mesh, kind, axis) for kind in COLLECTIVES for axis, n in enumerate(mesh.shape) if n > 1}

    def price(step: Step, sent: int, written: int) -> float:
        if step.is_collective:
            time = times.get((step.kind, step.axis))
            return time(sent) if time else 0.0
        return LOCAL_STEP + traffic_time(mesh.hardware, written)

    return price
