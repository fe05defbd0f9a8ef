"""The models of the equality sweep, small real ones built from configs. Each function returns (model, args, kwargs)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.llama import Llama

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class MLP(nn.Module):
    """L pairs of a widening and a narrowing linear layer."""

    def __init__(self, pairs: int = 2, dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(dim, hidden) for _ in range(pairs)])
        self.down = nn.ModuleList([nn.Linear(hidden, dim) for _ in range(pairs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(F.gelu(up(x)))
        return x


class CNN(nn.Module):
    """Convolutions with batch norm, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        logits = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits, F.cross_entropy(logits, target)


class NextToken(nn.Module):
    """A causal language model with its loss in the model's own dtype (transformers computes it in float32)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(input_ids=tokens).logits
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mlp(batch: int = 8) -> Case:
    return MLP(), (torch.randn(batch, 16),), {}


def llama(batch: int = 4) -> Case:
    return Llama.small(), (torch.randint(0, 64, (batch, 8)), torch.randint(0, 64, (batch, 8))), {}


def cnn(batch: int = 8) -> Case:
    return CNN(), (torch.randn(batch, 3, 8, 8), torch.randint(0, 10, (batch,))), {}


def gpt2(batch: int = 2, vocabulary: int = 50257, layers: int = 2) -> Case:
    """Tied embeddings, and by default the real vocabulary, which no mesh divides."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=16,
        n_embd=8,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    return NextToken(GPT2LMHeadModel(config)), (torch.randint(0, vocabulary, (batch, 8)),), {}


def bert(batch: int = 4, layers: int = 2) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=101,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    tokens = torch.randint(0, 101, (batch, 8))
    mask = torch.ones(batch, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    return BertForMaskedLM(config), (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def vit(batch: int = 2, layers: int = 2) -> Case:
    """197 tokens: 14 x 14 patches and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=16,
        image_size=56,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return ViTForImageClassification(config), (), {"pixel_values": torch.randn(batch, 3, 56, 56), "labels": torch.randint(0, 10, (batch,))}


class Tagger(nn.Module):
    """An LSTM that gives each token a class."""

    def __init__(self, tokens: int = 32, dim: int = 8, hidden: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.lstm(self.embed(tokens))[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten())


def lstm(batch: int = 8) -> Case:
    return Tagger(), (torch.randint(0, 32, (batch, 3)), torch.randint(0, 5, (batch, 3))), {}


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "cnn": cnn,
    "lstm": lstm,
    "mlp_batch5": lambda: mlp(5),
    "llama_batch5": lambda: llama(5),
}
ONE_LAYER: dict[str, Callable[[], Case]] = {
    "gpt2_one_layer": lambda: gpt2(layers=1),
    "bert_one_layer": lambda: bert(layers=1),
    "vit_one_layer": lambda: vit(layers=1),
}
"""For tests outside of sweeps: in them only Llama and the MLP repeat their layers."""


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """The model ``name`` in ``dtype``, with weights and inputs from ``seed``."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model, args, kwargs = {**ONE_LAYER, **MODELS}[name]()
    finally:
        torch.set_default_dtype(before)
    return model, args, kwargs
