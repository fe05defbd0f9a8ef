"""The fit of the constants of NCCL's model that are not published, and its cross-validation: each source left out in turn.

Minimises the squares of the logarithms of predicted over measured, by coordinate descent with ever smaller steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from bench.published.collective_time import CALL, is_single_call
from bench.published.rows import Collective, hardware_of
from fxshard.cost.nccl import nccl_times
from fxshard.mesh.architectures import FITTED, Fitted
from fxshard.mesh.mesh import Mesh

Constants = Mapping[str, float]
STEPS = (1.2, 1.05, 1.01)
START: Constants = {**asdict(FITTED), "call": CALL}


def fitted(rows: Sequence[Collective]) -> Constants:
    """The constants, ``call`` included, that fit ``rows`` best. One that no row depends on stays as it is."""
    at, now = dict(START), _error(rows, START)
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


def left_out(rows: Sequence[Collective]) -> dict[str, tuple[Constants, list[float]]]:
    """Source -> the constants fitted to the other sources, and predicted over measured of its own rows with them."""
    found = {}
    for source in dict.fromkeys((row.source, row.device) for row in rows):
        others = [row for row in rows if (row.source, row.device) != source]
        constants = fitted(others)
        own = [row for row in rows if (row.source, row.device) == source]
        found[f"{source[1]}, {source[0]}"] = constants, [time_with(row, constants) / row.measured for row in own]
    return found


def _error(rows: Sequence[Collective], constants: Constants) -> float:
    return sum(math.log(time_with(row, constants) / row.measured) ** 2 for row in rows)
