"""``fxshard::shift`` in Inductor: a collective, whose operand stays unchanged in memory until the wait, as for torch's own.

What would replace it: a registration of custom operators as collectives.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Register the lowering of ``shift`` with Inductor, once; the operator is defined in ``fxshard.ops``."""
    from torch._inductor.lowering import lowerings, register_lowering

    op = torch.ops.fxshard.shift.default
    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(_lower)


def _lower(input: Any, group_name: str) -> Any:
    from torch._inductor import ir

    contiguous = ir.ExternKernel.require_contiguous(input)
    contiguous.realize()
    return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(torch.ops.fxshard.shift.default, contiguous, group_name))
