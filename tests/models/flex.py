"""A grouped-query attention by ``flex_attention`` for tests: its masks, changes of scores, and the same in single operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 2
WIDTH = HEADS * HEAD_DIM
MASKS = ("causal", "window", "documents", "prefix", "heads")
SCORES = ("alibi", "cap", "table")


class FlexAttention(nn.Module):
    """``mask`` and ``score``: names of MASKS and SCORES. Called with x [batch, sequence, WIDTH] and documents [batch, sequence], the number
    of each token's document."""

    def __init__(self, mask: str | None = None, score: str | None = None, dense: bool = False) -> None:
        super().__init__()
        self.mask, self.score, self.dense = mask, score, dense
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.7, HEADS))
        self.table = nn.Parameter(torch.randn(HEADS, 8))
        self.register_buffer("prefix", torch.tensor([3, 1]))

    def mods(self, documents: Tensor) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        """(score_mod, mask_mod)."""
        slopes, table, prefix = self.slopes, self.table, self.prefix
        scores = {
            "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
            "cap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
            "table": lambda s, b, h, q, k: s + table[h, (q - k) % 8],
        }
        masks = {
            "causal": lambda b, h, q, k: q >= k,
            "window": lambda b, h, q, k: (q >= k) & (q - k < 3),
            "documents": lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
            "prefix": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
            "heads": lambda b, h, q, k: (q - k) % (h + 1) == 0,
        }
        return scores.get(self.score or ""), masks.get(self.mask or "")

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        score, mask = self.mods(documents)
        batch, length = x.shape[:2]
        if self.dense:
            y = _dense(q, k, v, score, mask)
        else:
            blocks = None if mask is None else create_block_mask(mask, batch, HEADS, length, length, device=x.device.type)
            y = flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def _dense(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    ranges = [torch.arange(size) for size in scores.shape]
    place = [r.view([-1 if i == dim else 1 for i in range(4)]) for dim, r in enumerate(ranges)]
    scores = scores if score is None else score(scores, *place)
    kept = torch.ones((), dtype=torch.bool) if mask is None else mask(*place)
    return scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v


class VarlenAttention(FlexAttention):
    """Causal attention within packed sequences. Called with x [tokens, WIDTH] and bounds [sequences + 1], where they begin and end."""

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        if not self.dense:
            return self.wo(varlen_attn(q, k, v, bounds, bounds, len(x), len(x), window_size=(-1, 0), enable_gqa=True).flatten(1))
        sequence = torch.searchsorted(bounds, torch.arange(len(x), dtype=torch.int32), right=True)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        y = _dense(q, k, v, None, lambda b, h, i, j: (sequence[i] == sequence[j]) & (i >= j))
        return self.wo(y[0].transpose(0, 1).flatten(1))


def both(mask: str | None, score: str | None, kind: type[FlexAttention] = FlexAttention) -> tuple[nn.Module, nn.Module]:
    """The model, and the same in single operators, with equal weights of float64."""
    torch.manual_seed(0)
    model, dense = kind(mask, score).double(), kind(mask, score, dense=True).double()
    dense.load_state_dict(model.state_dict())
    return model, dense


def inputs(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """(x, documents of about three tokens each, which differ among sequences)."""
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return x, (torch.arange(length) + torch.arange(batch)[:, None]) // 3
