"""Ten models of realistic widths and few layers with their loss, without weights: ``MODELS[name]()`` gives (model, args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from bench.families.family import Case, Loss, config_of
from bench.planning import models as planned

LAYERS, BATCH = 2, 64
BFLOAT16 = torch.bfloat16


def _tokens(length: int, batch: int = BATCH) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64, device="meta")


def llama() -> Case:
    """Two layers of Llama 3 8B, 64 x 2048 tokens."""
    from examples.llama import Llama, LlamaConfig

    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=LAYERS)).to(BFLOAT16)
    return model, (_tokens(2048), _tokens(2048)), {}


def gpt2() -> Case:
    """Two layers of GPT-2 medium, 64 x 1024 tokens."""
    from transformers import AutoModelForCausalLM

    config = config_of("gpt2", False, n_layer=LAYERS, n_embd=1024, n_head=16, vocab_size=50304, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=BFLOAT16)
    return Loss(model, shift=True), (), {"input_ids": _tokens(1024), "target": _tokens(1024)}


def bert() -> Case:
    """Two layers of BERT large, 64 x 512 tokens."""
    from transformers import AutoModelForMaskedLM

    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config_of("bert", False, num_hidden_layers=LAYERS, **sizes), dtype=BFLOAT16)
    return Loss(model), (), {"input_ids": _tokens(512), "target": _tokens(512)}


def vit() -> Case:
    """Two layers of ViT huge, 128 images of 224 x 224."""
    from transformers import AutoModelForImageClassification

    sizes = {"hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14}
    with torch.device("meta"):
        config = config_of("vit", False, num_hidden_layers=LAYERS, num_labels=1000, **sizes)
        model = AutoModelForImageClassification.from_config(config, dtype=BFLOAT16)
        images = torch.zeros(2 * BATCH, 3, 224, 224, dtype=BFLOAT16)
    return Loss(model), (), {"pixel_values": images, "target": _tokens(2 * BATCH, 1)[0]}


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class Convolutions(nn.Module):
    """A stem, two residual blocks at each of two widths, and a classifier."""

    def __init__(self, width: int = 256, labels: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.narrow = nn.ModuleList(Residual(width) for _ in range(LAYERS))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.wide = nn.ModuleList(Residual(2 * width) for _ in range(LAYERS))
        self.head = nn.Linear(2 * width, labels)

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.narrow:
            x = block(x)
        x = self.down(x)
        for block in self.wide:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


def cnn() -> Case:
    """A residual network, 128 images of 224 x 224."""
    with torch.device("meta"):
        return Convolutions().to(BFLOAT16), (torch.zeros(2 * BATCH, 3, 224, 224, dtype=BFLOAT16), _tokens(2 * BATCH, 1)[0]), {}


def moe() -> Case:
    """Two layers of a mixture of 32 experts; 64 x 2048 tokens."""
    model, args, _ = planned.moe(LAYERS)
    return model, args, {"input_ids": _tokens(2048), "target": _tokens(2048)}


def t5() -> Case:
    """Two layers in each of encoder and decoder of T5 base, with dropout, in float32; 64 x 512 tokens."""
    return planned.t5(LAYERS)


def mamba() -> Case:
    """Two layers of a Mamba 2 of width 1024, 64 x 1024 tokens."""
    from transformers import AutoModelForCausalLM

    states = {"state_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 64, "num_heads": 32, "n_groups": 8, "chunk_size": 256}
    config = config_of("mamba2", False, num_hidden_layers=LAYERS, hidden_size=1024, vocab_size=50304, use_cache=False, **states)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=BFLOAT16)
    return Loss(model, shift=True), (), {"input_ids": _tokens(1024), "target": _tokens(1024)}


class Blocks(nn.Module):
    """Residual perceptrons of width ``dim``; the mean square is the loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(LAYERS))
        self.layers = nn.ModuleList(pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x * x).mean()


def mlp() -> Case:
    """Two perceptrons of width 8192, 64 x 128 rows."""
    with torch.device("meta"):
        return Blocks(8192).to(BFLOAT16), (torch.zeros(BATCH, 128, 8192, dtype=BFLOAT16),), {}


class Recommender(nn.Module):
    """A wide table of embeddings, the mean of the entries of each row, and a perceptron that gives a score."""

    def __init__(self, entries: int = 2**22, dim: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(LAYERS))
        self.score = nn.Linear(dim, 2)

    def forward(self, entries: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.table(entries).mean(1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.score(x), clicked)


def embedding() -> Case:
    """A recommender of 4 million entries, 8192 rows of 32 entries."""
    with torch.device("meta"):
        return Recommender().to(BFLOAT16), (_tokens(32, 8192), _tokens(8192, 1)[0]), {}


MODELS: dict[str, Callable[[], Case]] = {make.__name__: make for make in (llama, gpt2, bert, t5, vit, cnn, moe, mamba, mlp, embedding)}
