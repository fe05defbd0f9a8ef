"""Private names of torch (2.13): fake tensors, their errors, tensors that hold others, the storage and version of any tensor.

What would replace them: ``torch.export`` or ``torch.compile`` with a documented fake mode; a method of tensors for each of
storage identity and version.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FAKE_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "changes_of",
    "forget_inner_sizes",
    "is_traceable_wrapper_subclass",
    "kernels_for_shapes",
    "quiet_fakes",
    "storage_key",
]

FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors that fake tensors raise where a tensor with data would work."""


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Suppress the traceback that torch logs when an operator rejects its operands, since the error is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def kernels_for_shapes(mode: FakeTensorMode, allowed: bool) -> Iterator[None]:
    """Whether ``mode`` may run the kernel of an operator, on zeros in place of its operands, if nothing else knows its shapes."""
    before = mode.allow_fallback_kernels
    mode.allow_fallback_kernels = before and allowed
    try:
        yield
    finally:
        mode.allow_fallback_kernels = before


def storage_key(value: torch.Tensor) -> int:
    """A key that is equal for tensors that share storage, fake ones too, while one of them is alive; under vmap, that of all slices."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.untyped_storage()._cdata


def changes_of(value: torch.Tensor) -> int:
    """A tensor's version: the number of in-place writes."""
    return value._version


def forget_inner_sizes(operands: Any, result: Any) -> None:
    """Drop unbacked symbols that were created inside a call captured as one node and are not in its result: they need no node."""
    mode = next((t.fake_mode for t in pytree.tree_leaves(operands) if isinstance(t, FakeTensor)), None)
    env = None if mode is None else mode.shape_env
    if env is not None:
        kept = set().union(*map(free_unbacked_symbols, pytree.tree_leaves(result)))
        env.pending_fresh_unbacked_symbols[:] = [s for s in env.pending_fresh_unbacked_symbols if s in kept]
