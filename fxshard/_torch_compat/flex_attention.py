"""Private names of torch (2.13): ``flex_attention`` as one operator, on the CPU too, and its functions as graphs.

What would replace them: ``flex_attention`` that is traced for training on any device, and a documented way to trace its functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch_compat.patched import patched


def flex_attention_of_any_device() -> contextlib.AbstractContextManager[None]:
    """While Dynamo captures: allow training with flex_attention on the CPU, where models are traced; its kernels never run there."""
    from torch.nn.attention import flex_attention as module

    return patched(module, "_validate_device", lambda query, key, value: None)


def is_flex_attention(target: Any) -> bool:
    """Whether a node of a captured graph calls ``flex_attention``: (q, k, v, score_mod, block mask, scale, options, buffers, buffers)."""
    return target is torch.ops.higher_order.flex_attention


def graph_of_mod(mod: Callable[..., Any], examples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The aten graph of a ``mask_mod`` or ``score_mod`` on fake scalars, in which indexing by a scalar is ``aten.index``."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), TransformGetItemToIndex():
        return make_fx(mod)(*examples)
