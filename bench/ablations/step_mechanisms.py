"""The mechanisms that change a step on real ranks. Each is off in processes of its own (``bench.ablations.steps``)."""

from __future__ import annotations

from typing import Any

from bench.ablations.mechanism import Mechanism, no, nothing
from bench.ablations.planning_mechanisms import unless

GROUPS, COMPILE = "fxshard.runtime.groups", "fxshard.runtime.compile.compile"


def _as_they_are(parts: Any, results: int) -> tuple[Any, int]:
    return parts, 0


STEPS: tuple[Mechanism, ...] = (
    Mechanism(
        "gloo threads",
        "step",
        "let gloo's network threads wait for a core",
        {f"{GROUPS}.gloo_threads.set_policy": lambda: 0},
        ("runtime/groups/gloo_threads.py",),
    ),
    Mechanism(
        "host memory",
        "step",
        "keep freed memory in the process",
        {f"{GROUPS}.host_memory.keep_freed": no},
        ("runtime/groups/host_memory.py",),
    ),
    Mechanism(
        "reduce-scatter by all-to-all",
        "step",
        "on gloo, send each rank its block instead of an all-reduce",
        {f"{GROUPS}.reduce_scatter.WITHOUT_REDUCE_SCATTER": frozenset()},
        ("runtime/groups/reduce_scatter.py",),
    ),
    Mechanism(
        "merged calls",
        "step",
        "common-subexpression elimination in a rank's graphs",
        {f"{COMPILE}.merge_equal_calls": lambda module: 0, f"{COMPILE}.merge_equal_in_halves": _as_they_are},
        ("runtime/rank_graph/common_subexpressions.py",),
    ),
    Mechanism(
        "outline",
        "step",
        "compile repeated parts of a graph once",
        {f"{COMPILE}.outline": nothing},
        ("runtime/compile/outline.py", "runtime/compile/repeats.py"),
    ),
    Mechanism("schedule in a step", "step", "start collectives early, wait for them late", unless("schedule")),
    Mechanism("bucket in a step", "step", "merge small collectives", unless("bucket")),
)
