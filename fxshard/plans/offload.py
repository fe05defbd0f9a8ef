"""What a plan holds in the memory of the host: the optimiser's state of a parameter, or the parameter with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fxshard.errors import OptionError, a_kind, closest

OPTIMIZER, PARAMETERS = "optimizer", "parameters"
KINDS = (OPTIMIZER, PARAMETERS)
"""``OPTIMIZER``: the optimiser's state is copied to the device for the step, and back. ``PARAMETERS``: so is the parameter, which is also
copied to the device for the forward and again for the backward; its gradient is copied to the host."""


@dataclass(frozen=True)
class Offload:
    """What of one parameter is on the host. ``node``: the parameter's graph node; ``kind``: one of ``KINDS``; ``held``: bytes there.

    ``inward``, ``outward``: bytes that a step copies to the device and back, on the rank with the largest shard. ``cost``: its share of the
    objective, in the plan's unit: microseconds, of which none are hidden, or these bytes.
    """

    node: str
    kind: str
    held: int
    inward: int
    outward: int
    cost: float


def read_offload(given: Any) -> tuple[str, ...]:
    """The kinds that may be on the host; True stands for all, False and None for none. Raises OptionError for anything else."""
    if given is None or isinstance(given, bool):
        return KINDS if given else ()
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Iterable):
        raise OptionError(f"offload is {a_kind(given)}", where="offload", remedy=REMEDY)
    found = tuple(names)
    for name in found:
        if name not in KINDS:
            raise OptionError(f"unknown offload {name!r}{closest(str(name), KINDS)}", where="offload", remedy=REMEDY)
    return tuple(kind for kind in KINDS if kind in found)


REMEDY = 'give "optimizer", "parameters", both in a tuple, True for both, or False'
