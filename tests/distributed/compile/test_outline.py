"""Deep models on two ranks, whose layers are compiled once: in each sharding, loss and gradients are those of one device."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from examples.llama import Llama
from fxshard.runtime.compile import compile
from fxshard.runtime.compile.outline import outline
from tests.distributed.scenarios import two_ranks
from tests.models.zoo import NextToken

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TENSOR = {
    "layers.*.attention.w[qkv].weight": "S(0)",
    "layers.*.attention.wo.weight": "S(1)",
    "layers.*.feed_forward.w[13].weight": "S(0)",
    "layers.*.feed_forward.w2.weight": "S(1)",
}
LAYERS = 8


SIZES = [(4, 16), (8, 12), (6, 9), (3, 7), (1, 5), (16, 32)]
"""(batch, sequence): some divide evenly over two ranks, others do not."""


def stepped(model: nn.Module, args: tuple[Tensor, ...], **options: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Loss and whole gradients of a step on the ranks, and how many calls each subgraph of forward and backward has."""
    calls: list[tuple[int, ...]] = []
    with mock.patch.object(compile, "outline", side_effect=lambda module: calls.append(outline(module))):
        sharded = fxshard.parallelize(model, args, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), cache=False, **options)
        torch.manual_seed(1)
        loss = sharded(*args)
        loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in sharded.parameters())], calls


def check(model: nn.Module, args: tuple[Tensor, ...], **options: Any) -> None:
    whole = copy.deepcopy(model)
    loss = whole(*args)
    loss.backward()
    found, calls = stepped(model, args, **options)
    assert len(calls) >= 2 and all(max(c, default=0) >= LAYERS // 2 for c in calls), calls
    alike(found, [loss.detach(), *(p.grad for p in whole.parameters())])


def alike(found: list[Tensor], expected: list[Tensor]) -> None:
    scale = max(float(x.norm()) for x in expected[1:])
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * max(float(other.abs().max()), 1e-2 * scale)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Llama.small(layers=LAYERS), tuple(torch.randint(0, 256, (2, 4, 16)))


class Loss(NextToken):
    """The loss alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[1]


def gpt2(dropout: float) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=128, n_positions=16, use_cache=False, **rates)
    return Loss(GPT2LMHeadModel(config)), (torch.randint(0, 128, (4, 16)),)


def llama_by_rows() -> None:
    check(*llama(), input_layouts={"args[0]": "S(0)", "args[1]": "S(0)"})


def llama_by_weights() -> None:
    check(*llama(), pins=TENSOR)


def gpt2_by_rows() -> None:
    check(*gpt2(0.0), input_layouts="S(0)")


def gpt2_with_dropout_as_eager() -> None:
    found, calls = stepped(*gpt2(0.1), input_layouts="S(0)")
    assert all(calls), calls
    alike(found, stepped(*gpt2(0.1), input_layouts="S(0)", compiler="eager")[0])


def any_size(**options: Any) -> None:
    """Loss and gradients are those of one device at each size. The program for all sizes is compiled by layer, forward and backward."""
    model, args = llama()
    whole, calls = copy.deepcopy(model), list[tuple[int, ...]]()
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    shapes = ({0: batch, 1: seq}, {0: batch, 1: seq})
    with mock.patch.object(compile, "outline", side_effect=lambda module: calls.append(outline(module))):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded: Any = fxshard.parallelize(model, args, mesh, cache=False, dynamic_shapes=shapes, **options)
        for rows, length in SIZES:
            tokens = tuple(torch.randint(0, 256, (2, rows, length)))
            results = []
            for one in (sharded, whole):
                one.zero_grad()
                loss = one(*tokens)
                loss.backward()
                grads = [p.grad for p in one.parameters()]
                results.append([loss.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)])
            alike(*results)
    assert len(sharded.forward.programs) <= 2
    assert len(calls) >= 4 and all(max(c, default=0) >= LAYERS // 2 for c in calls), calls


def llama_of_any_size_by_rows() -> None:
    any_size(input_layouts={"args[0]": "S(0)", "args[1]": "S(0)"})


def llama_of_any_size_by_weights() -> None:
    any_size(pins=TENSOR)


ANY_SIZE = llama_of_any_size_by_rows, llama_of_any_size_by_weights
found, test_two_ranks = two_ranks(*ANY_SIZE, llama_by_rows, llama_by_weights, gpt2_by_rows, gpt2_with_dropout_as_eager)
