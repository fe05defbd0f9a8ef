"""Which attention CUDA's flash kernel computes."""

from __future__ import annotations

import pytest
import torch

from fxshard.ops.attention import takes_flash


def pair(dtype: torch.dtype, dim: int, keys: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(2, 4, 16, dim, dtype=dtype), torch.empty(2, 4, keys, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "dim", "keys", "masked", "is_causal", "taken"),
    [
        (torch.bfloat16, 64, 16, False, True, True),
        (torch.float16, 256, 32, False, False, True),
        (torch.bfloat16, 64, 32, False, True, False),  # flash cuts at the last key, aten at the first
        (torch.bfloat16, 64, 16, True, False, False),
        (torch.bfloat16, 36, 16, False, False, False),
        (torch.bfloat16, 264, 16, False, False, False),
        (torch.float32, 64, 16, False, False, False),
        (torch.float64, 64, 16, False, False, False),
    ],
)
def test_what_flash_computes(dtype: torch.dtype, dim: int, keys: int, masked: bool, is_causal: bool, taken: bool) -> None:
    q, k = pair(dtype, dim, keys)
    mask = torch.ones(16, keys, dtype=torch.bool) if masked else None
    assert takes_flash(q, k, mask, is_causal) is taken
