"""Python numbers that a call changes in the objects that it is given: sizes of later calls, or each is another call."""

from __future__ import annotations

import logging

from torch.distributed.device_mesh import DeviceMesh

from fxshard.graph.objects import Counted, outcome_spec_of
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.runtime.ranks.launch import announce

COUNTS = "each call changes %s%s, a Python number: with another number it is another call, which has a program of its own"


def new_counters(graph: PlanningGraph, counted: Counted) -> Counted:
    """The numbers that a call changes in its objects, and that are not yet among the leaves of calls."""
    after = outcome_spec_of(graph.out_spec)
    return frozenset() if after is None else after.counters - counted


def warn_of_counts(graph: PlanningGraph, told: set[str], device_mesh: DeviceMesh) -> None:
    """Names those that are values of a call, once: those in ``told`` were named before."""
    after = outcome_spec_of(graph.out_spec)
    counts = [path for path in (after.counts if after is not None else ()) if path not in told]
    if counts:
        told.update(counts)
        others = f" and {len(counts) - 1} more" if len(counts) > 1 else ""
        announce(device_mesh, logging.WARNING, COUNTS, counts[0], others)
