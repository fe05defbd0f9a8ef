"""A family has a name, a kind, and a function that builds a tiny random model of it with example inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
VOCABULARY = 64
LABELS = 6
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Arguments that most configs of Hugging Face take."""


@dataclass(frozen=True)
class Family:
    """``build(dropout)`` gives (model, args, kwargs) in torch's default dtype; without ``dropout`` nothing is random."""

    name: str
    kind: str
    build: Callable[[bool], Case]


class Loss(nn.Module):
    """A model with the cross-entropy of its logits (b, ..., c), computed in their own dtype: transformers would compute it in float32."""

    def __init__(self, model: nn.Module, shift: bool = False) -> None:
        super().__init__()
        self.model = model
        self.shift = shift

    def forward(self, target: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits
        if self.shift:
            logits, target = logits[:, :-1], target[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def config_of(model_type: str, dropout: bool, **changes: Any) -> Any:
    """A config of transformers; without ``dropout`` every probability in it is 0."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **changes)
    if not dropout:
        _without_dropout(config)
    return config


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "model_type"):
            _without_dropout(value)


def tokens(batch: int = 4, length: int = 8) -> torch.Tensor:
    """Token numbers (batch, length), without special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length))


def warmed(model: nn.Module, **inputs: torch.Tensor) -> None:
    """Runs ``model`` once: some of transformers install hooks in their first call, under a lock that Dynamo cannot enter."""
    with torch.no_grad():
        model(**inputs)
