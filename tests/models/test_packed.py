"""Packed projections are cut by heads: programs equal one device, forward and backward, on any plan."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from equality import mesh_of
from packed_models import MODELS, Attention, GateUp, by_head, made, slices, split, view
from test_known_collectives import residual_pins
from torch import nn

import fxshard
from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import ConstraintError, FileError, FxshardError, LayoutError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.parallel import read_parallel
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.plans.small_plans import by_hand


@lru_cache(maxsize=2)
def prepared(name: str) -> tuple[Any, PlanningGraph, Any]:
    model, x = made(name)
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


def check(name: str, plan: fxshard.ShardingPlan) -> None:
    case, graph, reference = prepared(name)
    assert fxshard.ShardingPlan.from_json(plan.to_json()) == plan
    program = lower_plan(graph, plan)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


@pytest.mark.parametrize(
    ("take", "pairs", "parts"), [(split, 8, "512+512+512"), (slices, 2, "512+128+128"), (view, 8, "512+512+512"), (by_head, 8, "")]
)
def test_packed_weights_have_megatrons_collectives(take: Any, pairs: int, parts: str) -> None:
    """With the residual stream whole, each layer has one all-reduce after attention and one after the MLP, and as many in the backward."""
    with torch.device("meta"):
        model = nn.Sequential(Attention(take, 8, pairs, 64), GateUp(512, 2048), Attention(take, 8, pairs, 64), GateUp(512, 2048))
        x = torch.empty(4, 128, 512, requires_grad=True)
    graph = trace(model, (x,))
    attention = f"S(0:{parts})" if parts else "S(0)"
    pins = {
        "*.out.weight": "S(1)",
        "*.down.weight": "S(1)",
        "*.out.bias": "R",
        "[02].packed.*": attention,
        "[13].packed.*": "S(0:2048+2048)",
    }
    pins |= residual_pins(graph, (4, 128, 512))
    plan = plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(pins=pins, input_layouts="R", output_layouts="R"))
    assert plan.gap == 0
    assert [(c.kind, c.buffer) for c in plan.collectives] == [("all_reduce", (4, 128, 512))] * 8


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_the_solvers_plan_equals_one_device(name: str, mesh: str) -> None:
    check(name, plan_graph(prepared(name)[1], mesh_of(mesh), Request()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_equal_one_device(name: str, mesh: str, seed: int) -> None:
    check(name, random_graph_plan(annotate(prepared(name)[1], mesh_of(mesh)), seed))


def test_packed_pins_take_the_parts_from_the_model() -> None:
    _, graph, _ = prepared("fewer pairs")
    mesh = mesh_of("dp=2,tp=2")
    for request in (Request(pins={"packed.*": {"tp": PackedShard(0, ())}}), Request(pins={"packed.*": "RS(0:packed)"})):
        plan = plan_graph(graph, mesh, request)
        assert {str(plan.specs[f"packed_{name}"].outputs[0][1]) for name in ("weight", "bias")} == {"PackedShard(0, (8, 4, 4))"}
        assert "S(0:8+4+4) shards each part of dim 0 by itself: packed.weight, packed.bias" in str(plan)
        check("fewer pairs", plan)
    with pytest.raises(LayoutError, match=r"out.weight.* cannot be S\(0:packed\): the model does not take its dim 0 apart"):
        plan_graph(graph, mesh, Request(pins={"out.weight": "RS(0:packed)"}))
    with pytest.raises(ConstraintError, match=r"S\(0:6\+6\+4\)"):
        plan_graph(graph, mesh, Request(pins={"packed.weight": "RS(0:6+6+4)"}))


def test_hugging_faces_style_packs_the_weight() -> None:
    _, graph, _ = prepared("gate and up")
    styles = read_parallel({"packed": "packed_colwise", "down": "rowwise"}, fxshard.Mesh({"tp": 2}))
    plan = plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(parallel=styles))
    assert str(plan.specs["packed_weight"].outputs[0]) == "S(0:10+10)"


def test_a_plans_file_with_other_parts_is_refused() -> None:
    _, graph, _ = prepared("fewer pairs")
    text = by_hand(plan_graph(graph, mesh_of("tp=2"), Request(pins={"packed.weight": "S(0:packed)"})))
    with pytest.raises(FileError, match="do not add up"):
        fxshard.ShardingPlan.from_json(text.replace("S(0:8+4+4)", "S(0:8+4+5)"))
    with pytest.raises(FxshardError, match=r"cannot run as .*6\+6\+4"):
        lower_plan(graph, fxshard.ShardingPlan.from_json(text.replace(":8+4+4", ":6+6+4")))


FALCON: dict[str, dict[str, Any]] = {
    "falcon rw": {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "bias": True},
    "falcon 40b": {"new_decoder_architecture": True, "num_kv_heads": 4},
}
"""[q k v] of each head in turn, and of each group; 40B runs attention and MLP side by side, after a norm each."""


def published(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Two layers of width 1024 of transformers' GPT-2, Phi-3 (16 heads, 4 of keys and values) or Falcon, on meta, with tokens."""
    from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, Phi3Config

    sizes = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
    if name == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = GPT2Config(n_layer=2, n_embd=1024, n_head=16, n_positions=128, **dropout, **sizes)
    elif name == "phi3":
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        config = Phi3Config(num_hidden_layers=2, hidden_size=1024, intermediate_size=4096, max_position_embeddings=128, **heads, **sizes)
    else:
        shape = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 128}
        config = FalconConfig(**shape, **FALCON[name], alibi=False, hidden_dropout=0.0, attention_dropout=0.0, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config), torch.zeros(4, 128, dtype=torch.int64)


@lru_cache(maxsize=1)
def graph_of(name: str) -> PlanningGraph:
    model, tokens = published(name)
    return trace(model, (tokens,))


SIDE_BY_SIDE = range(4, 7)
"""One all-reduce forward, of the sum of both, and backward one, or one for each norm."""


@pytest.mark.parametrize(
    ("name", "ranks", "counts"),
    [
        ("gpt2", 2, [8]),
        ("gpt2", 4, [8]),
        ("phi3", 4, [8]),
        ("falcon rw", 2, [8]),
        ("falcon rw", 4, [8]),
        ("falcon 40b", 2, SIDE_BY_SIDE),
        ("falcon 40b", 4, SIDE_BY_SIDE),
    ],
)
def test_models_of_transformers_have_megatrons_collectives_without_pins(name: str, ranks: int, counts: Any) -> None:
    """Four all-reduces a layer, two forward and two backward, with whole inputs and results. A gradient of the head, which is small, may be
    computed in shards and gathered."""
    plan = plan_graph(graph_of(name), fxshard.Mesh({"tp": ranks}, "h100"), Request(input_layouts="R", output_layouts="R"))
    kinds = [c.kind for c in plan.collectives if c.readers[0][0] != "output"]
    assert plan.gap == 0 and set(kinds) == {"all_reduce"} and len(kinds) in counts
