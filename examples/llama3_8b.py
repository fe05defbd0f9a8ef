"""A model with the shape of Llama 3 8B, on meta: you can plan it on a laptop, without weights in memory.

fxshard plan examples/llama3_8b.py:training --mesh dp=8,tp=8 --hardware h100 -o llama3_8b.json
fxshard inspect llama3_8b.json --collectives
"""

from __future__ import annotations

import torch
from llama import Llama, LlamaConfig
from torch import Tensor

BATCH, LENGTH = 16, 8192


def model() -> Llama:
    """8 billion parameters in bfloat16, none of them in memory."""
    with torch.device("meta"):
        return Llama(LlamaConfig()).to(torch.bfloat16)


def tokens() -> Tensor:
    return torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")


def training() -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Tokens and targets of a global batch -> the mean cross-entropy."""
    return model(), (tokens(), tokens())


def inference() -> tuple[Llama, tuple[Tensor]]:
    """A prompt -> logits."""
    return model().eval(), (tokens(),)
