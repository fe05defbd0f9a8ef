"""``fxshard::shift``, ``zigzag``, ``dispatch`` and ``combine`` in Inductor: collectives, whose operand stays unchanged until the wait.

What would replace it: a registration of custom operators as collectives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def register() -> None:
    """Register the lowerings with Inductor, once; the operators are defined in ``fxshard.ops``."""
    from torch._inductor.lowering import lowerings, register_lowering

    own = torch.ops.fxshard
    for op in (own.shift.default, own.zigzag.default, own.dispatch.default, own.combine.default):
        if op not in lowerings:
            register_lowering(op, type_promotion_kind=None)(partial(_lower, op))


def _lower(op: Any, input: Any, *arguments: Any) -> Any:
    from torch._inductor import ir

    contiguous = ir.ExternKernel.require_contiguous(input)
    contiguous.realize()
    return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(op, contiguous, *arguments))
