"""The kernels of fxshard's device-independent operators, by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kernel = Callable[..., Any]
K = TypeVar("K", bound=Kernel)

KERNELS: dict[Any, Kernel] = {
    torch.ops.aten.masked_select.default: lambda x, mask: torch.ops.aten.masked_select(*torch.broadcast_tensors(x, mask)),
}
"""Operator -> its implementation by operators of the device; ``fxshard.ops`` adds its own."""


Shared = dict[Any, Any]
"""Values that calls of one graph share, under keys of their choice; empty at its first call."""
FUSED: dict[Any, Callable[..., Any]] = {}
"""Operator -> its implementation where Inductor compiles for CUDA, in place of that of ``KERNELS``; a ``Shared`` is its first argument."""


ALLOCATIONS: dict[Any, Kernel] = {}
"""Operators whose steps depend on values -> operators of the device that allocate what they may need at most, to count memory."""


def operator(fake: Callable[..., Any]) -> Callable[[K], K]:
    """Makes a function the kernel of a new operator ``fxshard::<its name>``, with its signature as the schema.

    The operator's results are contiguous, whatever the function returns. ``fake``: empty results, for the same arguments.
    """

    def register(kernel: K) -> K:
        @functools.wraps(kernel)
        def eager(*args: Any) -> Any:
            out = kernel(*args)
            return tuple(t.contiguous() for t in out) if isinstance(out, tuple) else out.contiguous()

        name = f"fxshard::{kernel.__name__}"
        schema = torch.library.infer_schema(kernel, mutates_args=())
        torch.library.custom_op(name, eager, mutates_args=(), schema=schema).register_fake(fake)
        KERNELS[getattr(torch.ops.fxshard, kernel.__name__).default] = kernel
        return kernel

    return register
