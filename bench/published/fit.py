"""The fit of the constants of NCCL's model that are not published, and its cross-validation: each source left out in turn.

Minimises the squares of the logarithms of predicted over measured, by coordinate descent with ever smaller steps, from several starts that
know nothing of the rows: the error has several local minima. A source that is left out has no part in the fit, its start included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.published.collective_time import is_single_call
from bench.published.rows import Collective, hardware_of
from fxshard.cost.nccl import nccl_times
from fxshard.mesh.architectures import Fitted
from fxshard.mesh.mesh import Mesh

Constants = Mapping[str, float]
STEPS = (1.2, 1.05, 1.01)
NEUTRAL: Constants = {"network": 1.0, "fill": 1.0, "fill_bytes": 2.0**20, "nvls_tree": 14.0, "call": 25.0}
"""The line rate of network cards and NCCL's own 14 us; round numbers for what NCCL does not have."""
STARTS = tuple(
    {**NEUTRAL, "fill": fill, "fill_bytes": size, "nvls_tree": hop}
    for hop in (14.0, 28.0)
    for fill, size in ((1.0, 2.0**20), (0.5, 2.0**21), (2.0, 2.0**19))
)


def fitted(rows: Sequence[Collective]) -> Constants:
    """The constants, ``call`` included, that fit ``rows`` best. One that no row depends on is neutral."""
    return min((_descended(rows, start) for start in STARTS), key=lambda found: _error(rows, found))


def undetermined(rows: Sequence[Collective], constants: Constants) -> list[str]:
    """The constants on which no row depends: a tenth more or less changes no time."""
    error = _error(rows, constants)
    return [
        name
        for name, value in constants.items()
        if all(math.isclose(_error(rows, {**constants, name: value * factor}), error, rel_tol=1e-12) for factor in (1.1, 1 / 1.1))
    ]


def _descended(rows: Sequence[Collective], start: Constants) -> Constants:
    at, now = dict(start), _error(rows, start)
    for step in STEPS:
        better = True
        while better:
            better = False
            for name in at:
                for factor in (step, 1 / step):
                    there = {**at, name: at[name] * factor}
                    if there["network"] <= 1 and (error := _error(rows, there)) < now - 1e-9:
                        at, now, better = there, error, True
    return at


def time_with(one: Collective, constants: Constants) -> float:
    """Microseconds of a collective under these constants, from event to event."""
    h = replace(hardware_of(one.device), node_size=one.ranks // one.nodes)
    assert h.reached is not None
    span = Mesh({"all": one.ranks}, h).span(0)
    times = nccl_times(one.kind, span, h.inside, h.between, h.reached, Fitted(**{k: v for k, v in constants.items() if k != "call"}))
    return h.launch + min(time(one.size) for time in times.values()) + (constants["call"] if is_single_call(one) else 0.0)


def left_out(rows: Sequence[Collective]) -> dict[str, tuple[Constants, list[str], list[float]]]:
    """Source -> the constants fitted to the other sources, those on which these do not depend, and predicted over measured of its own rows
    with them."""
    found = {}
    for source in dict.fromkeys((row.source, row.device) for row in rows):
        others = [row for row in rows if (row.source, row.device) != source]
        constants = fitted(others)
        own = [row for row in rows if (row.source, row.device) == source]
        found[f"{source[1]}, {source[0]}"] = (
            constants,
            undetermined(others, constants),
            [time_with(row, constants) / row.measured for row in own],
        )
    return found


def _error(rows: Sequence[Collective], constants: Constants) -> float:
    return sum(math.log(time_with(row, constants) / row.measured) ** 2 for row in rows)
