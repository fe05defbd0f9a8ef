"""The models of the sweep with dynamic dims: their dynamic shapes, arguments of any size, and programs run at each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from equality import mesh_of
from torch import nn
from zoo import Case, gpt2, make

from fxshard.errors import SizesError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

BOTH, BATCH = {0: "batch", 1: "seq"}, {0: "batch"}
DYNAMIC: dict[str, Any] = {
    "mlp": (BATCH,),
    "llama": (BOTH, BOTH),
    "gpt2": (BOTH,),
    "bert": {"input_ids": BOTH, "attention_mask": BOTH, "labels": BOTH},
    "vit": {"pixel_values": BATCH, "labels": BATCH},
    "cnn": (BATCH, BATCH),
    "t5": {"input_ids": BOTH, "labels": {0: "batch", 1: "out"}},
    "lstm": (BATCH, BATCH),
}
"""The dynamic dims of each model's arguments. The LSTM is unrolled over time, so that only its batch is dynamic."""
SIZES = ((4, 8), (8, 16), (12, 2), (6, 5), (9, 11), (5, 7), (3, 4), (7, 3), (1, 8), (8, 1))
"""(batch, length): even, odd, smaller than the number of ranks, and 1."""


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, dropout_rate=0, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    tokens = torch.randint(1, 64, (4, 8))
    return T5ForConditionalGeneration(config), (), {"input_ids": tokens, "labels": tokens[:, :6].clone()}


def case(name: str, own_precision: bool = True) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the zoo, or T5. GPT-2, BERT and ViT have one layer, GPT-2 a small vocabulary, which no mesh divides.

    ``own_precision``: see the function ``in_own_precision``.
    """
    torch.manual_seed(0)
    if name == "gpt2":
        model, args, kwargs = gpt2(vocabulary=257, layers=1)
        return model.double(), args, kwargs
    if name in ("bert", "vit"):
        return make(f"{name}_one_layer")
    if name != "t5":
        return make(name)
    model, args, kwargs = t5()
    return (in_own_precision(model) if own_precision else model).double(), args, kwargs


def in_own_precision(model: nn.Module) -> nn.Module:
    """T5 with norms that compute in the model's dtype. T5's own norms compute in float32, where the order of additions matters too much."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, T5LayerNorm)]:
        model.set_submodule(name, nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon))
    return model


def resized(name: str, args: Sequence[Any], kwargs: dict[str, Any], batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments like ``args`` and ``kwargs`` for another batch and length, always the same ones for the same sizes."""
    draw = torch.Generator().manual_seed(1000 * batch + seq)

    def one(path: str, value: Any, dims: dict[int, str]) -> Any:
        length = {"batch": batch, "seq": seq, "out": 2 * seq}
        shape = [length[dims[d]] if d in dims else size for d, size in enumerate(value.shape)]
        if value.dtype.is_floating_point:
            return torch.randn(shape, dtype=value.dtype, generator=draw)
        return torch.ones(shape, dtype=value.dtype) if "mask" in path else torch.randint(0, int(value.max()) + 1, shape, generator=draw)

    dims = DYNAMIC[name]
    if isinstance(dims, dict):
        return (), {key: one(key, value, dims[key]) for key, value in kwargs.items()}
    return tuple(one(f"args[{i}]", value, d) for i, (value, d) in enumerate(zip(args, dims, strict=True))), {}


@cache
def traced(name: str, batch: int, seq: int, uneven: bool) -> tuple[nn.Module, PlanningGraph, Callable[[int, int], Any]]:
    model, args, kwargs = case(name)
    example = resized(name, args, kwargs, batch, seq)
    dims = tuple(replace(d, uneven=uneven) for d in dynamic_dims(model, *example, DYNAMIC[name]))
    return model, trace(model, *example, dynamic=dims), lambda b, s: resized(name, args, kwargs, b, s)


def programs(graph: PlanningGraph, mesh: str, seeds: Sequence[int]) -> list[ShardedProgram]:
    """Programs of the solver's plan and of random plans."""
    annotated = annotate(graph, mesh_of(mesh))
    plans = [plan_graph(graph, mesh_of(mesh), Request(cache=False)), *(random_graph_plan(annotated, seed) for seed in seeds)]
    return [lower_plan(graph, plan) for plan in plans]


def random_programs(graph: PlanningGraph, mesh: str, count: int) -> list[ShardedProgram]:
    """Programs of random plans. With even shards, a plan that shards a dim such as ``seq - 1``, which is uneven at every size, is
    refused by name; the next one is used.
    """
    annotated, found = annotate(graph, mesh_of(mesh)), list[ShardedProgram]()
    for seed in range(20 * count):
        try:
            found.append(lower_plan(graph, random_graph_plan(annotated, seed)))
        except SizesError as error:
            assert graph.family is not None and not any(dim.uneven for dim in graph.family.dims) and "uneven whatever" in str(error), error
        if len(found) == count:
            break
    return found


def served(program: ShardedProgram, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether ``program`` serves the call. If so, checks that it computes what one device does, in float64."""
    sizes = sizes_of_call(program, *call)
    if program.refuses(sizes) is not None:
        return False
    at = program_at(program, sizes)
    assert_equal_to_one_device(simulate_program(at, program_values(at, model, *call)), one_device(copy.deepcopy(model), *call))
    return True
