"""Packed projections are cut by heads: programs equal one device, forward and backward, on any plan."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from equality import mesh_of
from packed_models import MODELS, Attention, GateUp, by_head, made, narrowed, slices, split, view
from test_known_collectives import residual_pins
from torch import nn

import fxshard
from fxshard import FullyShard, TensorParallel
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
from tests.slices import diagonal


@lru_cache(maxsize=2)
def prepared(name: str) -> tuple[Any, PlanningGraph, Any]:
    model, x = made(name)
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


def check(name: str, plan: fxshard.ShardingPlan) -> None:
    case, graph, reference = prepared(name)
    assert fxshard.ShardingPlan.from_json(plan.to_json()) == plan
    program = lower_plan(graph, plan)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


@lru_cache
def two_layers(take: Any, pairs: int) -> PlanningGraph:
    with torch.device("meta"):
        model = nn.Sequential(Attention(take, 8, pairs, 64), GateUp(512, 2048), Attention(take, 8, pairs, 64), GateUp(512, 2048))
        x = torch.empty(4, 128, 512, requires_grad=True)
    return trace(model, (x,))


@pytest.mark.parametrize(
    ("take", "pairs", "parts"),
    [
        (split, 8, "512+512+512"),
        (slices, 2, "512+128+128"),
        (narrowed, 2, "512+128+128"),
        (view, 8, "512+512+512"),
        (by_head, 8, ""),
    ],
)
def test_packed_weights_have_megatrons_collectives(take: Any, pairs: int, parts: str) -> None:
    """With the residual stream whole, each layer has one all-reduce after attention and one after the MLP, and as many in the backward."""
    graph = two_layers(take, pairs)
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


@pytest.mark.parametrize("tp", [TensorParallel(), {"packed": "packed_colwise", "out": "rowwise", "down": "rowwise"}])
def test_beside_packed_heads_fully_shard_takes_another_dim(tp: Any) -> None:
    """With a residual stream that is whole on tp, Megatron's collectives there; on dp each matrix is gathered once, and its gradient
    reduced and scattered, each in one step."""
    mesh = fxshard.Mesh({"dp": 2, "tp": 2}, "h100")
    graph = two_layers(slices, 2)
    pins = dict.fromkeys(residual_pins(graph, (4, 128, 512)), "S(0)R")
    plan = plan_graph(graph, mesh, Request(parallel=read_parallel({"dp": FullyShard(), "tp": tp}, mesh), pins=pins))
    names = ("0_packed_weight", "0_packed_bias", "0_out_weight", "1_packed_weight", "1_down_weight")
    layouts = [str(plan.specs[f"_{name}"].outputs[0]) for name in names]
    assert layouts == ["S(1)S(0:512+128+128)", "RS(0:512+128+128)", "S(0)S(1)", "S(1)S(0:2048+2048)", "S(0)S(1)"]
    on = {axis: [(c.kind, len(c.buffer)) for c in plan.collectives if c.axis == axis] for axis in ("dp", "tp")}
    assert on["tp"] == [("all_reduce", 3)] * 8
    assert [on["dp"].count((kind, 2)) for kind in ("all_gather", "reduce_scatter")] == [8, 8]
    assert {kind for kind, _ in on["dp"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_fully_shard_beside_packed_heads_equals_one_device() -> None:
    mesh = mesh_of("dp=2,tp=2")
    words = read_parallel({"dp": FullyShard(), "tp": {"packed": "packed_colwise", "out": "rowwise"}}, mesh)
    plan = plan_graph(prepared("fewer pairs")[1], mesh, Request(parallel=words))
    assert [str(plan.specs[f"packed_{name}"].outputs[0]) for name in ("weight", "bias")] == ["S(1)S(0:8+4+4)", "RS(0:8+4+4)"]
    check("fewer pairs", plan)


@pytest.mark.parametrize(("name", "mesh"), diagonal([*MODELS], ["tp=2", "tp=4", "dp=2,tp=2"]))
def test_the_solvers_plan_equals_one_device(name: str, mesh: str) -> None:
    check(name, plan_graph(prepared(name)[1], mesh_of(mesh), Request()))


@pytest.mark.parametrize(("name", "mesh", "seed"), diagonal([*MODELS], ["tp=3", "dp=2,tp=2", "tp=2"], range(4)))
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
    "falcon 7b": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False},
}
"""[q k v] of each head in turn, of each group, and of all heads; 40B and 7B run attention and MLP side by side, 40B after a norm each."""


@lru_cache
def published(name: str) -> PlanningGraph:
    """Two layers of width 1024 of transformers' GPT-2, GPT-NeoX, Falcon or Phi-3 (16 heads, in Phi-3 4 of keys and values), on meta."""
    from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, GPTNeoXConfig, Phi3Config

    sizes = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
    wide = {"num_hidden_layers": 2, "hidden_size": 1024, "max_position_embeddings": 128}
    if name == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = GPT2Config(n_layer=2, n_embd=1024, n_head=16, n_positions=128, **dropout, **sizes)
    elif name == "phi3":
        config = Phi3Config(num_attention_heads=16, num_key_value_heads=4, intermediate_size=4096, **wide, **sizes)
    elif name in FALCON:
        dropout = dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
        config = FalconConfig(num_attention_heads=16, alibi=False, **FALCON[name], **dropout, **wide, **sizes)
    else:
        config = GPTNeoXConfig(num_attention_heads=16, intermediate_size=4096, use_parallel_residual=name == "neox", **wide, **sizes)
    with torch.device("meta"):
        model, tokens = AutoModelForCausalLM.from_config(config), torch.zeros(4, 128, dtype=torch.int64)
    return trace(model, (tokens,))


def reductions(plan: fxshard.ShardingPlan) -> list[str]:
    """The kinds of collectives. The head is small: it, or its gradient, may be computed in shards and gathered, which does not count."""
    return [c.kind for c in plan.collectives if c.readers[0][0] != "output" and c.value != "lm_head_weight"]


@pytest.mark.parametrize(
    ("name", "ranks", "counts"),
    [
        ("gpt2", 2, [8]),
        ("gpt2", 4, [8]),
        ("phi3", 4, [8]),
        ("neox, one after the other", 2, [8]),
        ("neox", 2, [6]),
        ("falcon rw", 2, [8]),
        ("falcon 40b", 2, [4, 5, 6]),
        ("falcon 40b", 4, [4, 5, 6]),
    ],
)
def test_models_of_transformers_have_megatrons_collectives_without_pins(name: str, ranks: int, counts: list[int]) -> None:
    """Four all-reduces a layer, two forward and two backward, with whole inputs and results. Where attention and MLP stand side by side,
    one all-reduce serves both results, and backward one, or one for each norm."""
    plan = plan_graph(published(name), fxshard.Mesh({"tp": ranks}, hardware="h100"), Request(input_layouts="R", output_layouts="R"))
    found = reductions(plan)
    assert plan.gap == 0 and set(found) == {"all_reduce"} and len(found) in counts, found


def test_a_plan_with_other_collectives_than_megatrons_costs_less() -> None:
    """Phi-3 on two ranks: the last layer is cheaper with a batch cut in two, as the reductions of its gradients hide behind compute."""
    graph, mesh = published("phi3"), fxshard.Mesh({"tp": 2}, hardware="h100")
    packed, rows = ("*.qkv_proj.weight", "*.gate_up_proj.weight"), ("*.o_proj.weight", "*.down_proj.weight")
    pins = {**dict.fromkeys(packed, "S(0:packed)"), **dict.fromkeys(rows, "S(1)"), **residual_pins(graph, (4, 128, 1024))}
    free, megatron = (plan_graph(graph, mesh, Request(pins=p, input_layouts="R", output_layouts="R")) for p in ({}, pins))
    assert reductions(megatron) == ["all_reduce"] * 8 and len(free.collectives) > 8
    assert free.gap == megatron.gap == 0 and 0.99 < free.objective / megatron.objective < 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_head_of_keys_and_values_is_gathered_as_megatron_does(ranks: int) -> None:
    """With fewer heads of keys and values than ranks, Megatron-Core gathers the whole projection (``get_query_key_value_tensors``), so
    four collectives a layer are its least here, too. The solver's plan has up to three more, and costs less than one with its weights."""
    graph, mesh = published("falcon 7b"), fxshard.Mesh({"tp": ranks}, hardware="h100")
    columns, rows = ("*.query_key_value.weight", "*.dense_h_to_4h.weight"), ("*.dense.weight", "*.dense_4h_to_h.weight")
    pins = {**dict.fromkeys(columns, "S(0)"), **dict.fromkeys(rows, "S(1)")}
    free, megatron = (plan_graph(graph, mesh, Request(pins=p, input_layouts="R", output_layouts="R")) for p in ({}, pins))
    projection = (4, 128, (1024 + 2 * 64) // ranks)
    assert ("all_gather", projection) in [(c.kind, c.buffer) for c in megatron.collectives]
    assert free.gap == megatron.gap == 0 and free.objective < megatron.objective
