"""Hardware whose prices are wrong by chance, to ask what a plan is worth if they are."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from fxshard.mesh.hardware import Curve, Efficiency, Hardware, Link

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def drawn(hardware: Hardware, error: float, seed: int) -> Hardware:
    """``hardware`` with each price multiplied by a factor of its own, whose logarithm is uniform, from 1 / (1 + error) to 1 + error.

    Drawn independently: the rate of arithmetic, the memory bandwidth, bandwidth and latency of the links inside nodes, between nodes and of
    each axis, those of all-to-alls and of all other collectives (a reduce-scatter and a gather are the halves of an all-reduce), and the
    launch. Measured curves take the factor of what they measure.
    """
    chance = random.Random(seed)

    def factor() -> float:
        return math.exp(chance.uniform(-1, 1) * math.log1p(error))

    def link(one: Link) -> Link:
        return Link(one.bandwidth * factor(), one.latency * factor())

    rate, memory, launch = factor(), factor(), factor()
    inside, between = link(hardware.inside), None if hardware.between is None else link(hardware.between)
    axes = {name: link(hardware.axes[name]) for name in sorted(hardware.axes)}
    rings, exchanges = (factor(), factor()), (factor(), factor())
    kinds = {kind: exchanges if kind == "all_to_all" else rings for kind in KINDS}
    return replace(
        hardware,
        flops={size: flops * rate for size, flops in hardware.flops.items()},
        memory_bandwidth=hardware.memory_bandwidth * memory,
        launch=hardware.launch * launch,
        inside=inside,
        between=between,
        axes=axes,
        measured=replace(
            hardware.measured,
            products={dtype: _slower(curve, 1 / rate) for dtype, curve in hardware.measured.products.items()},
            copy=None if hardware.measured.copy is None else _slower(hardware.measured.copy, 1 / memory),
            collectives={key: _slower(curve, 1 / kinds[key[0]][1]) for key, curve in hardware.measured.collectives.items()},
            efficiency={kind: _scaled(hardware.measured.efficiency.get(kind, Efficiency()), *kinds[kind]) for kind in KINDS},
        ),
    )


def _scaled(efficiency: Efficiency, latency: float, bandwidth: float) -> Efficiency:
    return Efficiency(efficiency.latency * latency, efficiency.bandwidth * bandwidth)


def _slower(curve: Curve, times: float) -> Curve:
    return Curve(tuple((size, time * times) for size, time in curve.points))
