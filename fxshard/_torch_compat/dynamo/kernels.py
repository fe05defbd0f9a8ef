"""Private names of torch (2.13): calls of users' Triton kernels in a traced graph.

torch keeps kernels, and arguments that a graph cannot hold, in global tables; a node holds their indexes.

What would replace it: ``torch.library.triton_op`` with the kernel's constants readable from the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
from torch._prims_common import clone_preserve_strides as clone_preserve_strides

FUNCTIONAL, MUTATION = triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
"""The operator that returns new tensors instead of writing to its arguments, and the one that writes to them."""
NONE = -1
"""fxshard's index in torch's table of arguments; its entry stays empty, since all arguments are passed in the call."""


def kernel_and_constants(number: int, constants: int) -> tuple[Any, Mapping[str, Any]]:
    """The entries of a node's indexes: the kernel, and the arguments that a graph cannot hold, by name."""
    return kernel_side_table.get_kernel(number), kernel_side_table.get_constant_args(constants)


def run_kernel(
    kernel: Any, grid: Sequence[Any], descriptors: Mapping[str, Any], arguments: Mapping[str, Any], written: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Run a kernel on copies of the tensors that it writes to, and return these by name."""
    kernel_side_table.constant_args.setdefault(NONE, {})  # torch forgets its tables when Dynamo is reset
    result: dict[str, torch.Tensor] = FUNCTIONAL(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=NONE,
        grid=list(grid),
        tma_descriptor_metadata=dict(descriptors),
        kwargs=dict(arguments),
        tensors_to_clone=list(written),
    )
    return result


@contextlib.contextmanager
def kernels_captured() -> Iterator[None]:
    """While a model is traced: Triton kernels are captured even on a machine without a GPU, if Triton is installed, and operators made by
    ``torch.library.triton_op`` stay one operator, like other custom operators, instead of being decomposed.

    torch finds the tensors that a kernel writes to from its IR, which is the same for all devices, so it is compiled for an absent GPU.
    """
    from torch._functorch import config
    from torch.utils import _triton

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(decompose_custom_triton_ops=False))
        if _triton.has_triton_package() and not _triton.has_triton():
            from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]  # Triton is no requirement
            from triton.runtime import driver  # type: ignore[import-not-found]  # likewise

            absent = mock.Mock(get_current_target=lambda: GPUTarget("cuda", 80, 32))
            stack.enter_context(mock.patch.object(_triton, "has_triton", lambda **_: True))
            stack.enter_context(mock.patch.object(driver, "_active", absent))
        yield
