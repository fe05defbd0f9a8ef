"""Private names of torch (2.13): ``flex_attention`` as one operator, on the CPU too, and in plain operators.

What would replace them: ``flex_attention`` that is traced for training on any device, and its documented reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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


def flex_attention_in_plain_operators() -> Callable[..., Any]:
    """torch's reference implementation, with the same arguments; of the block mask it reads only the last entry, the function."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention
