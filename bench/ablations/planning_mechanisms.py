"""The mechanisms of planning, of the passes after lowering, and of pipelines."""

from __future__ import annotations

from typing import Any

from bench.ablations.mechanism import Mechanism, nothing
from fxshard.passes.after_lowering.optimise import OPTIMISATIONS
from fxshard.passes.memory.offload import DEVICE
from fxshard.pipelines.cut import Chain, Cut

AFTER = "fxshard.passes.after_lowering"


def unless(name: str) -> dict[str, Any]:
    """The passes after lowering, with the named one replaced by a pass that changes nothing."""
    return {f"{AFTER}.optimise.OPTIMISATIONS": {**OPTIMISATIONS, name: lambda program: program}}


def _none(*given: Any) -> tuple[Any, ...]:
    return ()


def _equal_counts(chain: Chain, memory_limit: float) -> Cut:
    """Stages of equally many layers, as a split by hand."""
    starts = [i for i, layer in enumerate(chain.layers) if i == 0 or layer.starts]
    return tuple(starts[len(starts) * k // chain.stages] for k in range(chain.stages))


PLANNING: tuple[Mechanism, ...] = (
    Mechanism(
        "folded paths",
        "plan",
        "redistribute through folded layouts, in which axes leave a dim in any order",
        {"fxshard.layout.redistribution.folded_paths": _none},
        ("layout/folded_paths.py", "passes/lowering/folded.py"),
    ),
    Mechanism(
        "packed dims",
        "plan",
        "shard each part of a dim of several parts",
        {"fxshard.strategies.engine.engine._packed": _none},
        ("strategies/engine/packed.py", "passes/annotation/packing.py"),
    ),
    Mechanism(
        "ring attention",
        "plan",
        "shard queries and keys by sequence on one axis, and pass the keys around",
        {"fxshard.strategies.engine.engine._sharded_together": nothing},
        ("strategies/linear/ring_attention.py", "strategies/linear/zigzag.py"),
    ),
    Mechanism(
        "expert rows",
        "plan",
        "send rows of tokens to the ranks of their experts",
        {"fxshard.strategies.engine.engine.own_option": nothing},
        ("strategies/linear/expert_rows.py", "strategies/engine/expert_option.py", "ops/experts/rows.py"),
    ),
    Mechanism(
        "recomputation",
        "plan",
        "compute blocks again in the backward where memory is short",
        {"fxshard.passes.memory.saved_for_backward.blocks": _none},
        ("passes/annotation/recompute.py",),
    ),
    Mechanism(
        "offload",
        "plan",
        "keep parameters and the optimiser's state in the host's memory, where the user allows it",
        {"fxshard.passes.memory.offload.Offloading.places": lambda *given: (DEVICE,)},
        ("passes/memory/offload.py", "passes/memory/staging.py"),
    ),
    Mechanism(
        "memory floor",
        "plan",
        "count the memory that every plan certainly holds, for bounds and for plans between the two estimates",
        {"fxshard.passes.planning.formulate._Builder._relaxed": nothing},
        ("passes/memory/memory_lower_bound.py", "solver/limited.py"),
    ),
)

PIPELINES: tuple[Mechanism, ...] = (
    Mechanism(
        "cut by prices",
        "pipeline",
        "cut a chain of layers where a step takes the least time, instead of into equally many layers",
        {"fxshard.pipelines.plan.best_cut": _equal_counts},
        ("pipelines/cut.py:best_cut", "pipelines/cut.py:_stages", "pipelines/cut.py:_least_sum"),
    ),
)

PASSES: tuple[Mechanism, ...] = (
    Mechanism(
        "schedule",
        "lower",
        "start collectives early, wait for them late",
        unless("schedule"),
        ("passes/after_lowering/schedule.py",),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "chunk",
        "lower",
        "split a product and its collective into pieces",
        unless("chunk"),
        tuple(f"passes/after_lowering/{name}.py" for name in ("chunk", "cut_candidates", "cut_pieces", "follow_cut")),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "bucket",
        "lower",
        "merge small collectives",
        unless("bucket"),
        ("passes/after_lowering/bucket.py",),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "pieces behind",
        "lower",
        "split the readers of a collective too, not only its producers",
        {f"{AFTER}.chunk.readers": lambda *given: {}},
        ("passes/after_lowering/cut_candidates.py:readers",),
    ),
    Mechanism(
        "pieces before",
        "lower",
        "split the producers of a collective too, not only its readers",
        {f"{AFTER}.chunk.producers": lambda *given: {}},
        ("passes/after_lowering/cut_candidates.py:producers",),
    ),
)
