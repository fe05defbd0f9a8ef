"""Time of NCCL's collectives: a start, hops, and bytes over a bandwidth for each algorithm and protocol; the fastest at the size counts.

The formulas are those of NCCL's own tuner (src/graph/tuning.cc), by which NCCL chooses; its constants are in ``mesh.architectures``. For a
buffer of N bytes (``cost.collectives`` says which) on g ranks of each of m nodes:

- ring, all kinds: hops as in ``cost.collectives``; bus bandwidth the smaller of NVLink's and g network cards';
- tree, all-reduce between nodes: 2 (g - 1) hops inside and 2 ceil(log2 m) between, 2 N bytes;
- NVLS, all-reduce of three and more ranks in a node with NVLink's switch, and NVLS with a tree between nodes;
- point to point, all-to-all: all messages at once.

Ring and NVLS take longer per byte until their chunks fill the pipeline (``Fitted.fill``), trees by NCCL's own table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fxshard.mesh.architectures import (
    FITTED,
    NVLS_INSIDE,
    PROTOCOLS,
    RING,
    RING_LL,
    RING_LL128,
    TREE,
    TREE_LL,
    TREE_LL128,
    TREE_OVER_SIZES,
    TREE_PLAIN,
    TREE_SIMPLE,
    Architecture,
    Fitted,
)
from fxshard.mesh.hardware import Link
from fxshard.mesh.mesh import Span

Time = Callable[[float], float]
"""Microseconds of a collective on a buffer of that many bytes."""
LL, LL128, SIMPLE = range(len(PROTOCOLS))
NVLS_RANKS = 3
"""Least ranks of a node for which NCCL uses NVLink's switch."""
ONE_A_NODE = 1 / 3
"""Part of ``Fitted.fill`` in groups of one rank a node, where only the network's pipeline fills. Not published and not measured: chosen to
agree with two results of autoparallel's model of NCCL, 16 MiB on 8 nodes of H100, all-gather 406 us, all-reduce 1,124 us."""
POST = 1.0
"""Microseconds to post a message to another node (NCCL's NET_OVERHEAD)."""
GB = 1e3
"""Bytes per microsecond in a GB/s."""


def nccl_times(kind: str, span: Span, inside: Link, between: Link | None, on: Architecture, fitted: Fitted = FITTED) -> dict[str, Time]:
    """The algorithms of a collective, by name, on groups placed as in ``span``; ``between`` may be None inside a node."""
    g = span.size if span.is_inside else span.per_node or 1
    away = between.bandwidth / 1e9 * fitted.network if between else math.inf
    group = _Group(kind, g, span.size // g, inside.bandwidth / 1e9, away, on, fitted)
    if kind == "all_to_all":
        return {"point to point": group.exchanged()}
    return dict(group.rings()) | (dict(group.reducing()) if kind == "all_reduce" else {})


class _Group:
    """A collective of one kind on ``g`` ranks of each of ``m`` nodes; ``inside`` and ``between``: GB/s of a rank's links."""

    def __init__(self, kind: str, g: int, m: int, inside: float, between: float, on: Architecture, fitted: Fitted) -> None:
        self.fitted = fitted
        self.g, self.m, self.n, self.inside, self.between, self.on = g, m, g * m, inside, between, on
        self.steps, self.outer = ((2 if kind == "all_reduce" else 1) * (ranks - 1) for ranks in (self.n, m))
        self.bus = inside if m == 1 else between * g if g == 1 else min(inside, between * g)
        self.nodes = min(m, 3) - 1
        self.fill = fitted.fill * (ONE_A_NODE if g == 1 < m else 1.0)

    def rings(self) -> Iterator[tuple[str, Time]]:
        # One rank a node exposes the whole latency of the network, for which NCCL takes that of the tree.
        between = TREE.between if self.g == 1 else RING.between
        for protocol, name in enumerate(PROTOCOLS):
            start = RING.base[protocol] + (self.steps - self.outer) * RING.inside[protocol] + self.outer * between[protocol]
            bus = (min(self.bus * RING_LL, self.on.ll[self.nodes]), self.bus * RING_LL128, self.bus)[protocol]
            yield f"ring, {name}", self._filling(start, bus * self.n / self.steps, protocol != LL)

    def reducing(self) -> Iterator[tuple[str, Time]]:
        depth, cards = (self.m - 1).bit_length(), max(self.g, 2)
        if self.m > 1:
            tree = min(self.bus * TREE_SIMPLE, cards * self.on.tree_channel[self.nodes])
            low = (
                min(tree * TREE_LL, self.on.ll[self.nodes]),
                min(tree * TREE_LL128, cards * self.on.tree_ll128_channel[self.nodes]),
                tree,
            )
            for protocol, name in enumerate(PROTOCOLS):
                hops = 2 * ((self.g - 1) * TREE.inside[protocol] + depth * TREE.between[protocol])
                yield f"tree, {name}", _corrected(TREE.base[protocol] + hops, low[protocol] * TREE_PLAIN / 2, TREE_OVER_SIZES[protocol])
        if self.g >= NVLS_RANKS and self.on.nvls:
            switch = self.on.nvls * 8 / 14  # bytes of the buffer a microsecond do not depend on the number of ranks
            start, rate = NVLS_INSIDE, switch
            if self.m > 1:
                # Two nodes exchange their sums; in a tree of more, a node sends twice: NCCL halves the network's bandwidth there.
                away = self.between * self.g * (1.0 if self.m == 2 else self.n / self.steps)
                start, rate = start + 2 * depth * self.fitted.nvls_tree, min(switch, away)
            yield "NVLS" if self.m == 1 else "NVLS, tree", self._filling(start, rate)

    def exchanged(self) -> Time:
        """All-to-all of N bytes, 1/n of it for each rank."""
        away = self.n - self.g
        start = RING.base[SIMPLE] + (TREE.between[SIMPLE] + away * POST if away else RING.inside[SIMPLE])
        per_byte = max((self.g - 1) / self.inside, away / self.between) / self.n / GB
        return lambda size: start + per_byte * size

    def _filling(self, start: float, rate: float, fill: bool = True) -> Time:
        """``start`` and the bytes over ``rate`` GB/s; with ``fill``, more time for the first bytes."""
        full, more = self.fitted.fill_bytes * self.n, self.fill if fill else 0.0
        return lambda size: start + (size + more * min(size, full)) / rate / GB


def _corrected(start: float, rate: float, factors: tuple[float, ...]) -> Time:
    """``start`` and the bytes over ``rate`` GB/s times the factor at the size, interpolated between powers of two so that no smaller size
    takes longer."""

    def time(size: float) -> float:
        at = min(max(math.log2(max(size, 1.0)) - 6, 0.0), len(factors) - 1)
        low = min(int(at), len(factors) - 2)
        factor = factors[low] * (factors[low + 1] / factors[low]) ** (at - low)
        return start + size / (rate * factor) / GB

    return time
