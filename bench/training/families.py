"""The models of the bench and how each way lays them out: ``FAMILIES[name]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from bench.training.model import batch, llama
from bench.training.transformer import GPT2, VOCABULARY, ViT, images


class CannotRun(Exception):
    """A way that torch has no means for, with the reason."""


@dataclass(frozen=True)
class Family:
    """``make(width, length, layers)``: the model, whose call on ``batch(length, rows)`` is its loss; ``blocks``: the name of its layers;
    ``columns`` and ``rows``: the linear layers of a block that Megatron shards by outputs and by inputs, and ``embedding`` and ``output``
    outside the blocks; ``no_tensor_parallel``: why ``parallelize_module`` cannot run it."""

    make: Callable[[int, int, int], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]] = batch
    blocks: str = "layers"
    columns: tuple[str, ...] = ("wq", "wk", "wv", "up")
    rows: tuple[str, ...] = ("wo", "down")
    embedding: str | None = "embedding"
    output: str = "output"
    no_tensor_parallel: str = ""

    def styles(self) -> Mapping[str, Any]:
        """Megatron's layouts for ``parallelize_module``; the embedding is sharded by the width, because Dynamo cannot trace its masked sum
        twice. Raises ``CannotRun``."""
        if self.no_tensor_parallel:
            raise CannotRun(self.no_tensor_parallel)
        outer = [name for name in (self.embedding, self.output) if name]
        styles: dict[str, Any] = {name: ColwiseParallel(output_layouts=Replicate()) for name in outer}
        styles |= {f"{self.blocks}.*.{name}": ColwiseParallel() for name in self.columns}
        return styles | {f"{self.blocks}.*.{name}": RowwiseParallel() for name in self.rows}

    def megatron(self, model: nn.Module) -> dict[str, str]:
        """The same as pins of ``parallelize``, one for each parameter. Raises ``CannotRun``."""
        if self.no_tensor_parallel:
            raise CannotRun(f"the same layouts: {self.no_tensor_parallel}")
        return {name: self._pin(name) for name, _ in model.named_parameters()}

    def _pin(self, parameter: str) -> str:
        module, _, kind = parameter.rpartition(".")
        if any(module.endswith(f".{name}") for name in self.columns) or module == self.output:
            return "S(0)"
        if any(module.endswith(f".{name}") for name in self.rows):
            return "S(1)" if kind == "weight" else "R"
        return "S(1)" if module == self.embedding else "R"


def gpt2(width: int, length: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT2(width, length, layers)


def vit(width: int, length: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return ViT(width, length, layers)


class Experts(nn.Module):
    """transformers' Qwen 3 MoE with 8 experts, of which each token chooses two; its call is the mean cross-entropy."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": layers, "head_dim": width // 8}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
        routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width, "intermediate_size": width}
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **routed))
        self.model.set_experts_implementation("grouped_mm")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def experts(width: int, length: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Experts(width, layers)


GROUPED = "parallelize_module has no style for the weights of experts in one tensor"
FAMILIES: dict[str, Family] = {
    "llama": Family(
        lambda width, _, layers: llama(width, layers),
        columns=("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
        rows=("attention.wo", "feed_forward.w2"),
        embedding="tok_embeddings",
    ),
    "gpt2": Family(gpt2),
    "vit": Family(vit, images, embedding=None),
    "experts": Family(experts, blocks="model.model.layers", no_tensor_parallel=GROUPED),
}
