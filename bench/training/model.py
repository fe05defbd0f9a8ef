"""The model and the data of all measurements: a Llama whose attention is written as product, softmax and product.

DTensor has no rule for the CPU's SDPA kernel, so the peers could not run that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from examples.llama import Attention, Llama, LlamaConfig, rotate

BATCH = 4


class ManualAttention(Attention):
    """``Attention`` with its softmax written out."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.split_heads(self.wq(x)), cos, sin)
        k = rotate(self.split_heads(self.wk(x)), cos, sin)
        v = self.split_heads(self.wv(x))
        shared = q.shape[1] // k.shape[1]
        k, v = (t[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for t in (k, v))
        length = q.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).masked_fill(later, -math.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def llama(width: int, layers: int = 4) -> Llama:
    """8 heads, 4 heads for keys and values, a vocabulary of 1024; every process gets the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=1024, dim=width, layers=layers, heads=8, kv_heads=4, ffn=3 * width, rope_base=10000.0)
    model = Llama(config)
    for layer in model.layers:
        assert isinstance(layer.attention, nn.Module)
        manual = ManualAttention(config)
        manual.load_state_dict(layer.attention.state_dict())
        layer.attention = manual
    return model


def batch(length: int, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the whole batch, both [rows, length], the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 1024, (rows, length + 1), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
