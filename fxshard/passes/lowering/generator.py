"""The random generator of a lowered program: fxshard's, whose numbers do not depend on the mesh, or torch's."""

from __future__ import annotations

import torch

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard.errors import OptionError, closest
from fxshard.ops.random import GENERATORS
from fxshard.program.sharded_program import ShardedProgram

LOCAL_DRAWS = (torch.ops.fxshard.dropout_shard.default, torch.ops.fxshard.random_shard.default)


def check_generator(rng: str) -> None:
    """Raises OptionError unless ``rng`` is one of ``GENERATORS``."""
    if rng not in GENERATORS:
        raise OptionError(f"unknown rng {rng!r}{closest(rng, GENERATORS)}", where="rng", remedy=f"use one of {', '.join(GENERATORS)}")


def draw_from(program: ShardedProgram, rng: str) -> None:
    """Makes the random operators of ``program`` use ``rng``, in place; the program's hash includes it, so ranks compare it."""
    if rng == GENERATORS[0]:
        return
    for module in program.modules.values():
        for node in module.graph.nodes:
            if node.target in LOCAL_DRAWS:
                node.kwargs = {**node.kwargs, "rng": rng}
        module.recompile()
