"""The predicted time of a published collective: its price on a mesh of one axis."""

from __future__ import annotations

from dataclasses import replace

from bench.published.rows import Collective, hardware_of
from fxshard.cost import collective_time
from fxshard.cost.collectives import sent_fraction
from fxshard.mesh.mesh import Mesh

CALL = 54.0
"""Microseconds of one call of torch.distributed on an idle device, from event to event: the host's part, and waiting for the last rank.
Fitted to the two sources that time single calls; nccl-tests times many in a row, whose launches hide behind each other, as in a step."""


def is_single_call(one: Collective) -> bool:
    return "nccl-tests" not in one.source


def predicted(one: Collective) -> float:
    """Microseconds. nccl-tests counts the gathered tensor of an all-gather, and the scattered one of a reduce-scatter."""
    h = replace(hardware_of(one.device), node_size=one.ranks // one.nodes)
    mesh = Mesh({"all": one.ranks}, h)
    call = CALL if is_single_call(one) else 0.0
    return call + collective_time(one.kind, 0, round(one.size * sent_fraction(one.kind, one.ranks)), mesh)
