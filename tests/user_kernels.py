"""A substitute for a Triton kernel that runs on the CPU in plain torch. Everything between model and kernel is torch's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation


class Kernel:
    """The interface that torch uses: name of the function, names of the arguments, and ``kernel[grid](...)``.

    ``out[i] = x[i] * y[i] * factor`` for the first n elements in memory, in blocks of ``BLOCK``; ``seen``: the grids and shapes it ran on.
    """

    arg_names = ("x", "y", "out", "n", "factor", "BLOCK")
    configs: tuple[()] = ()

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def fn(self) -> None:
        """Gives the kernel its name."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(x: Tensor, y: Tensor, out: Tensor, n: int, factor: float, BLOCK: int) -> None:
            self.seen.append((tuple(x.shape), grid))
            flat = [t.as_strided((t.numel(),), (1,)) for t in (x, y, out)]
            for program in range(grid[0]):
                part = slice(program * BLOCK, min(n, (program + 1) * BLOCK))
                flat[2][part] = flat[0][part] * flat[1][part] * factor

        return launch


Kernel.fn.__name__ = "scale_kernel"
KERNEL = Kernel()
BLOCK = 8


@torch.compiler.allow_in_graph
def launched(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """The call that Dynamo puts into a graph for ``KERNEL[grid](x, y, out, ...)``."""
    out = torch.empty_like(x)
    arguments = {"x": x, "y": y, "out": out, "n": out.numel(), "factor": factor, "BLOCK": BLOCK}
    triton_kernel_wrapper_mutation(
        kernel_idx=kernel_side_table.add_kernel(KERNEL),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(-(-out.numel() // BLOCK), 1, 1)],
        tma_descriptor_metadata={},
        kwargs=arguments,
    )
    return out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return launched(x, y, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return launched(grad, y, ctx.factor), launched(grad, x, ctx.factor), None


class Net(nn.Module):
    """[5, 6] -> [5, 4]: two calls of the kernel forward, of which the second reads transposed tensors; four backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = Scaled.apply(self.lin(x), self.weight, 2.0).sin()
        return Scaled.apply(y.T.contiguous().T, y.exp().T.contiguous().T, 0.5)


def told_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds out from a kernel's code which arguments it writes; without Triton torch assumes all."""
    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", lambda *_: ["out"])
