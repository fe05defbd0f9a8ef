"""Collectives by alpha-beta: hops times latency plus bytes over bandwidth (ring forms; Thakur et al., 2005).

all-reduce 2(n-1) hops, all-gather, reduce-scatter and all-to-all n-1; bytes as ``redistribution.sent_bytes`` counts them.
"""

from __future__ import annotations

from functools import lru_cache

from fxshard.mesh import Mesh
from fxshard.redistribution import Price, Step

LOCAL_STEP = 0.1
"""Microseconds charged to a slice or a mask beside its bytes: it usually fuses, but is not nothing."""


def hops(kind: str, n: int) -> int:
    """Latency terms of a ring collective on ``n`` ranks."""
    return 2 * (n - 1) if kind == "all_reduce" else n - 1


def collective_time(kind: str, axis: int, sent: int, mesh: Mesh) -> float:
    """Microseconds of one collective in which each rank sends ``sent`` bytes on mesh axis ``axis``."""
    n = mesh.shape[axis]
    if n == 1:
        return 0.0
    link = mesh.link(axis)
    return mesh.hardware.launch + hops(kind, n) * link.latency + sent / link.bandwidth * 1e6


@lru_cache(maxsize=64)
def time_price(mesh: Mesh) -> Price:
    """The price of redistribution steps in microseconds on ``mesh``; a local step costs the bytes that it writes."""

    def price(step: Step, sent: int, written: int) -> float:
        if step.is_collective:
            return collective_time(step.kind, step.axis, sent, mesh)
        return LOCAL_STEP + written / mesh.hardware.memory_bandwidth * 1e6

    return price
