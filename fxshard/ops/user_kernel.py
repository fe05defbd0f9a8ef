"""``fxshard_users::triton_kernel``: a call of a user's Triton kernel, on whole tensors.

A kernel is a Python object with arguments of any type, so a node refers by name to an entry of ``CALLS``, a table of this process.
The name contains the kernel, its grid and its plain arguments, so that ranks can compare graphs. Programs with such calls cannot be
stored: stored programs may not use this namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxshard._torch_compat.dynamo.kernels import clone_preserve_strides, run_kernel


@dataclass(frozen=True)
class KernelCall:
    """A call without its tensors.

    ``plain``: arguments other than tensors; ``tensors``: names of tensor arguments, in order, with the strides that the kernel expects;
    ``written``: those that it writes to.
    """

    kernel: Any
    grid: tuple[Any, ...]
    descriptors: Mapping[str, Any]
    plain: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    written: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the kernel's function."""
        return str(getattr(_function(self.kernel), "__name__", "triton_kernel"))

    def __str__(self) -> str:
        tensors = {name: f"{list(strides)}{' written' if name in self.written else ''}" for name, strides in self.tensors.items()}
        given = {**{name: _text(value) for name, value in self.plain.items()}, **tensors}
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        home = getattr(_function(self.kernel), "__module__", "")
        return f"{home}.{self.name}({said}) on {_text(list(self.grid))}{_text(self.descriptors) if self.descriptors else ''}"


def _function(kernel: Any) -> Any:
    """The Python function inside a kernel and its autotuner."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _text(value: Any) -> str:
    """``value`` as text without memory addresses, which differ between ranks."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(one)}' for name, one in value.items())}}}"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    text = str(value)
    if " at 0x" not in text:
        return text
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


CALLS: dict[str, KernelCall] = {}


def keep_call(call: KernelCall) -> str:
    """Registers a call and returns its name; a different call with the same text gets a number."""
    text, count = str(call), 1
    while (name := text if count == 1 else f"{text} #{count}") in CALLS and CALLS[name] != call:
        count += 1
    CALLS.setdefault(name, call)
    return name


@torch.library.custom_op("fxshard_users::triton_kernel", mutates_args=())
def triton_kernel(tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    """The new values of the tensors that the kernel writes to."""
    known = CALLS[call]
    given = {name: _strided(x, strides) for x, (name, strides) in zip(tensors, known.tensors.items(), strict=True)}
    made = run_kernel(known.kernel, known.grid, known.descriptors, {**given, **known.plain}, known.written)
    return [made[name] for name in known.written]


@triton_kernel.register_fake
def _(tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    known = CALLS[call]
    places = list(known.tensors)
    return [clone_preserve_strides(_strided(tensors[places.index(name)], known.tensors[name])) for name in known.written]


def _strided(x: Tensor, strides: Sequence[int]) -> Tensor:
    """``x`` with the strides that the kernel expects; redistribution makes tensors contiguous."""
    return x if x.stride() == tuple(strides) else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
