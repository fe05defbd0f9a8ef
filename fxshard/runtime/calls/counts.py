"""Python numbers that a call changes in its argument objects: each becomes a dynamic size, or needs a program for every value."""

from __future__ import annotations

import logging

from torch.distributed.device_mesh import DeviceMesh

from fxshard.graph.objects import Counted, call_result_spec
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.runtime.ranks.launch import announce

COUNTS = "each call changes %s%s, a Python number: each value of such a number needs a program of its own"


def new_counters(graph: PlanningGraph, counted: Counted) -> Counted:
    """The numbers that a call changes in its objects and that ``counted``, the leaves of calls, does not contain yet."""
    after = call_result_spec(graph.out_spec)
    return frozenset() if after is None else after.counters - counted


def warn_of_counts(graph: PlanningGraph, told: set[str], device_mesh: DeviceMesh) -> None:
    """Warns once about numbers that a call changes and that are not dynamic sizes; ``told``: numbers warned about, updated here."""
    after = call_result_spec(graph.out_spec)
    counts = [path for path in (after.counts if after is not None else ()) if path not in told]
    if counts:
        told.update(counts)
        others = f" and {len(counts) - 1} more" if len(counts) > 1 else ""
        announce(device_mesh, logging.WARNING, COUNTS, counts[0], others)
