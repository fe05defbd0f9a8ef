"""Hardware whose prices are wrong by chance, to ask what a plan is worth if they are."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from fxshard.errors import OptionError, closest
from fxshard.mesh.hardware import Curve, Efficiency, Hardware, Link

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


FAMILIES = ("arithmetic", "memory", "inside", "between", "axes", "collectives", "all_to_all", "launch", "host")
"""Prices that are wrong together: the rate of arithmetic, the memory bandwidth, the links inside nodes, between nodes and of single axes,
all-reduces with reduce-scatters and gathers (the halves of an all-reduce), all-to-alls, the launch, the link to the host."""

STATED = "stated"
"""The error that asks for those that each family states (``STATED_ERRORS``)."""

STEP, BOUND, UNCOMPARED = 0.12, 0.3, 0.5
STATED_ERRORS = {
    "ampere": {"inside": 0.21, "between": BOUND},
    "hopper": {"inside": 0.29, "between": BOUND},
    "blackwell": {"inside": BOUND, "between": 0.39},
}
"""By architecture, what docs/hardware.md states. Arithmetic: the published steps, 0.89 to 1.09 (``STEP``). Links: the all-reduces of a
source that was left out of the fit, 0.87 to 1.21 and 0.87 to 1.29 inside nodes, 0.72 to 1.16 (1 / 0.72) between those of B200. All other
prices were compared with no measurement: ``BOUND`` where a data sheet bounds them, ``UNCOMPARED`` for all-to-alls."""

Errors = float | str | Mapping[str, float]


def errors_of(error: Errors, hardware: Hardware) -> dict[str, float]:
    """The error of each family; raises OptionError for one that is unknown or out of range.

    ``error``: one for all, ``"stated"``, or one by family, in which the others have none.
    """
    if error == STATED:
        if not hardware.architecture:
            what = f"the hardware {hardware.name!r} states no errors of its prices"
            raise OptionError(what, where="regret", remedy="give a number, such as 0.3, or a mapping by family of prices")
        general = dict.fromkeys(FAMILIES, BOUND) | {"arithmetic": STEP, "all_to_all": UNCOMPARED, "collectives": 0.0}
        return {**general, **STATED_ERRORS[hardware.architecture]}
    found = dict(error) if isinstance(error, Mapping) else dict.fromkeys(FAMILIES, error)
    for name, one in found.items():
        if name not in FAMILIES:
            raise OptionError(f"unknown family of prices {name!r}{closest(name, FAMILIES)}", remedy=f"they are {', '.join(FAMILIES)}")
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < 10:
            raise OptionError(f"prices cannot be wrong by {one!r}", where="regret", remedy="give an error such as 0.3")
    if not any(found.values()):
        raise OptionError(f"no price is wrong in {error!r}", where="regret", remedy="give an error such as 0.3")
    return {name: float(found.get(name, 0.0)) for name in FAMILIES}


def drawn(hardware: Hardware, errors: Errors, seed: int) -> Hardware:
    """``hardware`` with each price multiplied by a factor of its own, whose logarithm is uniform, from 1 / (1 + error) to 1 + error of its
    family.

    Drawn independently: the rate of arithmetic, the memory bandwidth, bandwidth and latency of the links inside nodes, between nodes and of
    each axis, those of all-to-alls and of all other collectives (a reduce-scatter and a gather are the halves of an all-reduce), the
    launch, and the link to the host. Measured curves take the factor of what they measure.
    """
    chance, within = random.Random(seed), errors_of(errors, hardware)

    def factor(family: str) -> float:
        return math.exp(chance.uniform(-1, 1) * math.log1p(within[family]))

    def link(one: Link, family: str) -> Link:
        return Link(one.bandwidth * factor(family), one.latency * factor(family))

    rate, memory, launch = factor("arithmetic"), factor("memory"), factor("launch")
    inside = link(hardware.inside, "inside")
    between = None if hardware.between is None else link(hardware.between, "between")
    axes = {name: link(hardware.axes[name], "axes") for name in sorted(hardware.axes)}
    rings, exchanges = ((factor(family), factor(family)) for family in ("collectives", "all_to_all"))
    host = None if hardware.host is None else link(hardware.host, "host")
    kinds = {kind: exchanges if kind == "all_to_all" else rings for kind in KINDS}
    return replace(
        hardware,
        flops={size: flops * rate for size, flops in hardware.flops.items()},
        memory_bandwidth=hardware.memory_bandwidth * memory,
        launch=hardware.launch * launch,
        inside=inside,
        between=between,
        axes=axes,
        host=host,
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
