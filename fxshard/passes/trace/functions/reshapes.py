"""Reshapes of tensors with symbolic sizes: they copy if it depends on a size whether a view is possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxshard._torch_compat.sizes.symbols import GuardRefused, refusing_guards, shape_env_of

FUNCTIONS = (torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten)


def _reshape(function: Callable[..., Any], _: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs ``function`` unchanged if it needs no guard on a symbol; otherwise on a contiguous copy, which is right for every size."""
    env = shape_env_of(input)
    if env is None:
        return NotImplemented
    try:
        with refusing_guards(env):
            return function(input, *args, **kwargs)
    except GuardRefused:
        return function(input.clone(memory_format=torch.contiguous_format), *args, **kwargs)


RESHAPES: dict[Any, Callable[..., Any]] = {function: partial(_reshape, function) for function in FUNCTIONS}
"""Replacements for ``Neutralise``."""
