"""Private names of torch (2.13): the memory format of a convolution's result for symbolic sizes.

What would replace it: a shape function of convolution that takes symbolic sizes in channels-last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_any, tree_map

LARGE = 4096
"""The size substituted for a symbol: above all thresholds of torch's kernels, so that no shard has size 0 or 1."""


@contextlib.contextmanager
def convolutions_of_any_size() -> Iterator[None]:
    """Within it, the kernel of a convolution, and with it the result's memory format, is chosen for large sizes, without guards.

    torch chooses by the example's sizes (one kernel for a batch below 16, another for an empty batch) and adds a guard each time. In a
    graph the kernel decides only the memory format, which follows from the input's and the weight's and does not depend on sizes.
    """
    from torch._subclasses import fake_impls
    from torch.fx.experimental import symbolic_shapes

    table = fake_impls.op_implementations_dict
    before = {op: implementation for op, implementation in table.items() if implementation.__name__ == "conv"}

    def any_size(real: Callable[..., Any]) -> Callable[..., Any]:
        def convolution(fake_mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            if not tree_any(_symbolic, (args, kwargs)):
                return real(fake_mode, op, *args, **kwargs)
            try:
                with fake_mode:
                    large = real(fake_mode, op, *tree_map(_large, args), **tree_map(_large, kwargs))
            except RuntimeError:  # not valid at the large size, for example a larger kernel or a cropped dim: do as torch does
                return real(fake_mode, op, *args, **kwargs)
            with mock.patch.object(symbolic_shapes, "has_guarding_hint", lambda size: not isinstance(size, torch.SymInt)):
                return tree_map(_laid_out, real(fake_mode, op, *args, **kwargs), large)

        return convolution

    table.update({op: any_size(real) for op, real in before.items()})
    try:
        yield
    finally:
        table.update(before)


def _symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and any(map(_symbolic, (*value.shape, *value.stride()))))


def _large(value: Any) -> Any:
    """The value with each symbol of its sizes replaced by LARGE."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        return int(expr.xreplace({symbol: LARGE for symbol in expr.free_symbols}))
    if not isinstance(value, torch.Tensor) or not _symbolic(value):
        return value
    shape, stride = map(_large, value.shape), map(_large, value.stride())
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=value.dtype, device=value.device)


def _laid_out(value: Any, large: Any) -> Any:
    """``value`` in the memory format of ``large``."""
    if not isinstance(value, torch.Tensor) or large.dim() not in (4, 5):
        return value
    last = torch.channels_last if large.dim() == 4 else torch.channels_last_3d
    return value.to(memory_format=last) if large.is_contiguous(memory_format=last) and not large.is_contiguous() else value
