"""Convolutions on symbolic sizes have the shapes and strides of torch's kernels at every size, and add no guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fxshard._torch_compat.sizes.symbols import SymbolEnv, oblivious

CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def results(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    y = torch.ops.aten.convolution(x, weight, None, *CONVOLUTION)
    return [y, *torch.ops.aten.convolution_backward(torch.ones_like(y), x, weight, None, *CONVOLUTION, [True, True, False])[:2]]


def at(value: Any, sizes: dict[Any, int]) -> Any:
    return int(value.node.expr.subs(sizes)) if isinstance(value, torch.SymInt) else value


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("example", [1, 4, 40])
def test_strides_are_those_of_the_kernels_at_every_size(memory_format: torch.memory_format, example: int) -> None:
    env = SymbolEnv()
    batch, height = env.symbol("batch", example), env.symbol("height", 9)
    order = (0, 2, 3, 1) if memory_format is torch.channels_last else (0, 1, 2, 3)
    with oblivious(), FakeTensorMode(shape_env=env.shape_env):
        found = results(torch.empty_permuted((batch, 3, height, 8), order), torch.empty(5, 3, 3, 3))
    assert not env.shape_env.guards
    for size, rows in ((1, 9), (2, 4), (15, 5), (16, 9), (40, 3)):
        x = torch.randn(size, 3, rows, 8).to(memory_format=memory_format)
        for symbolic, real in zip(found, results(x, torch.randn(5, 3, 3, 3)), strict=True):
            sizes = {batch.node.expr: size, height.node.expr: rows}
            assert [at(s, sizes) for s in symbolic.shape] == list(real.shape)
            assert [at(s, sizes) for s in symbolic.stride()] == list(real.stride())
