"""Which attention CUDA's flash kernel computes, and on which GPUs."""

from __future__ import annotations

import pytest
import torch

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.ops.sdpa import attention
from fxshard.ops.sdpa.attention import takes_flash


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


class Asked(Exception):
    """The name of the first operator that a kernel asks aten for."""


class Aten:
    def __getattr__(self, name: str) -> None:
        raise Asked(name)


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((7, 0), "efficient"), ((7, 5), "efficient"), ((8, 0), "flash"), ((9, 0), "flash"), ((12, 0), "flash"), (None, "flash")],
)
def test_volta_and_turing_run_the_memory_efficient_kernel(
    capability: tuple[int, int] | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "aten", Aten())
    for device, wanted in (("cuda", f"{kernel}_attention"), ("cpu", "flash_attention_for_cpu")):
        with FakeTensorMode():
            x = torch.empty(2, 4, 16, 64, dtype=torch.float16, device=device)
        with pytest.raises(Asked, match=f"^_scaled_dot_product_{wanted}$"):
            attention.sdpa(x, x, x, None, True, None, False)
