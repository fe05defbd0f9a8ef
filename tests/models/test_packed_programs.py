"""Packed weights in programs for any size, in files, with deferred reductions, and in models of transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from any_size import served
from equality import mesh_of
from packed_models import made
from torch import nn

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_deferred, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.slices import diagonal

PINS = {"packed.*": "RS(0:packed)", "packed": "S(0)S(2:packed)"}
"""The weight, and the result of the projection, by batch and by heads."""


@pytest.mark.parametrize(
    "name", ["fewer pairs, slices", "odd gate and up", *(pytest.param(n, marks=pytest.mark.slow) for n in ("split", "view"))]
)
def test_one_program_serves_odd_sizes(name: str) -> None:
    """The batch is uneven, or shorter than the mesh, while the weight is packed."""
    model, x = made(name)
    x = x.detach()
    dims = dynamic_dims(model, (x,), {}, ({0: "batch", 1: "seq"},))
    graph = trace(model, (x,), dynamic=tuple(fxshard.shapes.DynamicDim(**{**vars(d), "uneven": True}) for d in dims))
    plans = [plan_graph(graph, mesh_of("dp=2,tp=2"), Request(pins=PINS))]
    plans.append(random_graph_plan(annotate(graph, mesh_of("tp=3")), 0))
    assert any(layout.packed for layout in plans[0].specs["einsum"].inputs)
    for plan in plans:
        program = lower_plan(graph, plan)
        for batch, seq in ((8, 9), (5, 4), (1, 7)):
            other = torch.randn(batch, seq, x.shape[2], dtype=x.dtype)
            assert served(program, model, ((other,), {}))


def test_a_file_keeps_the_parts(tmp_path: Path) -> None:
    model, x = made("fewer pairs")
    x = x.detach()
    program = fxshard.export(model, (x,), fxshard.Mesh({"tp": 2}, hardware="cpu"), pins={"packed.*": "S(0:packed)"})
    program.save(tmp_path / "packed.pt2")
    loaded = fxshard.load(tmp_path / "packed.pt2")
    assert "S(0:8+4+4)" in map(str, loaded.input_layouts)
    assert_equal_to_one_device(fxshard.simulate(loaded, (x,)), one_device(model, (x,), {}, train=False))


def test_gradients_that_are_reduced_later() -> None:
    """With gradient accumulation, sums over the batch stay pending on one axis while the weight is packed on the other."""
    model, x = made("fewer pairs")
    graph = trace(model, (x,))
    plan = plan_graph(graph, mesh_of("dp=2,tp=2"), Request(pins=PINS, input_layouts="S(0)R", output_layouts="S(0)R"))
    program = lower_deferred(graph, plan)
    assert any(layout.packed and layout.has_partial for layout in program.output_layouts)
    assert_equal_to_one_device(simulate_program(program, program_values(program, model, (x,), {})), one_device(model, (x,), {}))


class NextToken(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(tokens).logits.flatten(0, 1), tokens.flatten())


def language_model(kind: str, **options: Any) -> nn.Module:
    import transformers

    common = {"vocab_size": 64, "use_cache": False}
    return NextToken(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**common, **options))).double()


SIZES = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 40, "max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Phi3": {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "original_max_position_embeddings": 16},
    "GPTNeoX": SIZES,
    "Falcon": {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True},
}


@pytest.mark.parametrize(("kind", "mesh"), diagonal([*MODELS], ["tp=4", "tp=2"]))
def test_models_of_transformers(kind: str, mesh: str) -> None:
    """Four ranks share two heads of keys and values, so that shards are uneven."""
    torch.manual_seed(0)
    model, tokens = language_model(kind, **MODELS[kind]), torch.randint(64, (4, 8))
    for name, norm in [(n, m) for n, m in model.named_modules() if type(m).__name__ == "Phi3RMSNorm"]:  # it computes in float32
        model.set_submodule(name, nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon, dtype=torch.float64))
    graph, reference = trace(model, (tokens,)), one_device(copy.deepcopy(model), (tokens,), {})
    plans = [plan_graph(graph, mesh_of(mesh), Request()), random_graph_plan(annotate(graph, mesh_of(mesh)), 1)]
    for plan in plans:
        program = lower_plan(graph, plan)
        assert_equal_to_one_device(simulate_program(program, program_values(program, model, (tokens,), {})), reference, rtol=1e-6)
