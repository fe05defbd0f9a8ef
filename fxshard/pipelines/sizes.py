"""Refuses microbatches of other sizes than those that the stages are planned for.

A stage would pad or cut such values, or send messages that do not fit into the buffers of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxshard.errors import SizesError
from fxshard.pipelines.split import Passed

REMEDY = "pad or drop the last batch, or plan with microbatches of that size"


def check_microbatch(planned: Sequence[Passed], args: Sequence[Any], kwargs: Mapping[str, Any], number: int, count: int) -> None:
    """Raises SizesError if arguments for the first stage have other shapes than planned."""
    named = {value.name: value for value in planned}
    pairs = [*zip(planned, args, strict=False), *((named[name], x) for name, x in kwargs.items() if name in named)]
    for value, given in pairs:
        if isinstance(given, torch.Tensor) and tuple(given.shape) != value.shape:
            shape = tuple(given.shape)
            what = (
                f"the argument {value.name!r} has the shape {shape} in microbatch {number}, and the pipeline is planned for {value.shape}"
            )
            remedy = f"{REMEDY}; a step divides its batch into {count} microbatches{_whole(value.shape, shape, count)}"
            raise SizesError(what, where=f"microbatch {number} of {count}, on the first stage", remedy=remedy)


def check_received(planned: Sequence[tuple[int, ...]], received: Sequence[torch.Tensor], stage: int) -> None:
    """Raises SizesError if values from the stage before have other shapes than planned."""
    for shape, given in zip(planned, received, strict=True):
        if (have := tuple(given.shape)) != shape:
            what = f"the values from the stage before have the shape {have}, and this rank's part is planned for {shape}"
            raise SizesError(what, where=f"stage {stage}", remedy=REMEDY)


def _whole(planned: Sequence[int], given: Sequence[int], count: int) -> str:
    """The rows of a whole batch, if only the rows differ."""
    rows = bool(planned) and len(planned) == len(given) and tuple(planned[1:]) == tuple(given[1:])
    return f", so pass {count * planned[0]} rows" if rows else ""
