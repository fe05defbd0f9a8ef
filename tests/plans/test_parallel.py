"""One-word plans: the layouts that each word says, the collectives of its paper, the numbers of one device, and what is refused."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

import fxshard
from examples.llama import Llama
from fxshard import ContextParallel, DataParallel, ExpertParallel, FullyShard, HybridShard, TensorParallel
from fxshard.errors import FxshardError, OptionError
from fxshard.layout.layouts import Layout
from fxshard.plans.parallel import STYLES, of_inputs, read_parallel

PLANS: dict[str, tuple[dict[str, int], Any]] = {
    "ddp": ({"dp": 4}, DataParallel()),
    "fsdp": ({"dp": 4}, {"dp": FullyShard()}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {("dp_replicate", "dp_shard"): HybridShard()}),
    "tp": ({"tp": 2}, TensorParallel()),
    "cp": ({"cp": 2}, ContextParallel()),
    "fsdp x tp": ({"dp_shard": 2, "tp": 2}, {"dp_shard": FullyShard(), "tp": TensorParallel()}),
    "fsdp x cp": ({"dp_shard": 2, "cp": 2}, {"dp_shard": FullyShard(), "cp": ContextParallel()}),
    "fsdp x auto": ({"dp": 2, "tp": 2}, {"dp": FullyShard(), "tp": "auto"}),
}


def llama() -> tuple[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 12), generator=torch.Generator().manual_seed(1))
    return Llama.small().double(), (tokens, tokens)


def planned(axes: dict[str, int], parallel: Any, **options: Any) -> Any:
    model, args = llama()
    return fxshard.plan(model, args, fxshard.Mesh(axes), parallel=parallel, cache=False, **options)


@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    axes, parallel = PLANS[name]
    model, args = llama()
    single = copy.deepcopy(model)
    result = fxshard.simulate(model, args, planned(axes, parallel))
    loss = single(*args)
    loss.backward()
    torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-9, atol=1e-9)
    noise = 1e-6 * float(torch.stack([p.grad.norm() for p in single.parameters() if p.grad is not None]).norm())
    for parameter, value in single.named_parameters():
        assert value.grad is not None
        error = float((result.grads[parameter] - value.grad).norm())
        assert error <= 1e-9 * max(float(value.grad.norm()), noise), parameter


def matrices(plan: Any) -> list[str]:
    model, _ = llama()
    nodes = [name.replace(".", "_") for name, p in model.named_parameters() if p.dim() == 2]
    return [str(plan.specs[node].outputs[0]) for node in nodes]


def kinds(plan: Any, axis: str) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives if c.axis == axis)


def test_fully_sharded_parameters_are_gathered_and_their_gradients_scattered() -> None:
    plan = planned(*PLANS["fsdp"])
    assert set(matrices(plan)) == {"S(0)"} and str(plan.specs["args_0"].outputs[0]) == "S(0)"
    found = kinds(plan, "dp")
    blocks = [n for n, _ in llama()[0].named_parameters() if n.startswith("layers")]
    assert found["all_gather"] >= len(blocks) and found["reduce_scatter"] >= len(blocks), found


def test_data_parallelism_reduces_each_gradient_and_gathers_no_weight() -> None:
    plan = planned(*PLANS["ddp"])
    assert set(matrices(plan)) == {"R"}
    count = sum(n.startswith("layers") for n, _ in llama()[0].named_parameters())
    assert kinds(plan, "dp")["all_reduce"] >= count and kinds(plan, "dp")["reduce_scatter"] == 0


def test_hybrid_sharding_reduces_over_replicas_what_it_scattered_over_shards() -> None:
    plan = planned(*PLANS["hsdp"])
    assert set(matrices(plan)) == {"RS(0)"} and str(plan.specs["args_0"].outputs[0]) == "S(0)S(0)"
    assert kinds(plan, "dp_shard")["reduce_scatter"] and kinds(plan, "dp_replicate")["all_reduce"]


def test_tensor_parallelism_leaves_no_matrix_whole() -> None:
    plan = planned(*PLANS["tp"])
    assert "R" not in matrices(plan) and str(plan.specs["args_0"].outputs[0]) == "R"


def test_context_parallelism_shards_the_sequence() -> None:
    plan = planned(*PLANS["cp"])
    assert set(matrices(plan)) == {"R"} and str(plan.specs["args_0"].outputs[0]) == "S(1)"


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(4, 8, 16)), "down": nn.Parameter(torch.randn(4, 16, 8))})

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        hidden = torch.einsum("td,edf->etf", x, self.experts["up"]).relu()
        return torch.einsum("etf,efd,te->td", hidden, self.experts["down"], weights)


def test_expert_parallelism_shards_the_experts() -> None:
    model, x = Experts(), torch.randn(8, 8)
    plan = fxshard.plan(model, (x,), fxshard.Mesh({"ep": 4}), parallel={"ep": ExpertParallel()}, cache=False)
    layouts = {name: str(plan.specs[name].outputs[0]) for name in ("experts_up", "experts_down", "gate_weight", "args_0")}
    assert layouts == {"experts_up": "S(0)", "experts_down": "S(0)", "gate_weight": "R", "args_0": "S(0)"}
    result = fxshard.simulate(model, (x,), plan)
    torch.testing.assert_close(result.outputs, model(x).detach())


@pytest.mark.parametrize("glob", ["experts", "*experts*", "experts.up", "layers.*.experts"])
def test_experts_are_named_by_module_or_parameter(glob: str) -> None:
    word = ExpertParallel(glob)
    assert str(word.parameter("layers.0.experts.up", (4, 8, 16))) == "S(0)" and not word.unmatched(["layers.0.experts.up"])
    assert str(word.parameter("layers.0.gate.weight", (4, 8))) == "R" and word.unmatched(["layers.0.gate.weight"]) == [glob]
    assert str(word.parameter("layers.0.shared_experts.up", (4, 8))) == ("S(0)" if glob == "*experts*" else "R")


def hugging_face(**options: Any) -> tuple[Any, Tensor]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **options
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).double().eval(), tokens


def test_the_tp_plan_of_a_hugging_face_model(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = hugging_face(use_cache=False, attention_bias=True)
    styles = {**model.config.base_model_tp_plan, "lm_head": "colwise_gather_output", "embed_tokens": "embedding_rowwise"}
    plan = fxshard.plan(model, (tokens,), fxshard.Mesh({"tp": 2}), train=False, parallel={"tp": styles}, cache=False)
    layer = {
        "self_attn_q_proj": "S(0)",
        "self_attn_k_proj": "S(0)",
        "self_attn_o_proj": "S(1)",
        "mlp_gate_proj": "S(0)",
        "mlp_up_proj": "S(0)",
        "mlp_down_proj": "S(1)",
    }
    want = {f"model_layers_{i}_{name}_weight": layout for i in range(2) for name, layout in layer.items()}
    want |= {"lm_head_weight": "S(0)", "model_embed_tokens_weight": "S(0)", "model_layers_0_self_attn_q_proj_bias": "S(0)"}
    want |= {"model_layers_0_self_attn_o_proj_bias": "R"}
    assert {name: str(plan.specs[name].outputs[0]) for name in want} == want
    assert not [r for r in caplog.records if "matches no module" in r.message]
    out = fxshard.simulate(model, (tokens,), plan).outputs
    torch.testing.assert_close(out.logits, model(tokens).logits.detach(), rtol=1e-9, atol=1e-9)


def test_rows_without_a_bias_are_reduced_not_computed_whole() -> None:
    """A Llama by its tp_plan, forward: one reduction after attention and one after the MLP, and no weight is gathered."""
    config = LlamaConfig(vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16)
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(config), torch.zeros(4, 128, dtype=torch.int64)
    styles = {"tp": {"layers.*.self_attn.[qkv]_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}}
    styles["tp"] |= {"layers.*.mlp.[gu]*_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    plan = fxshard.plan(model, (tokens,), fxshard.Mesh({"tp": 2}, "h100"), train=False, parallel=styles, output_layouts="R", cache=False)
    assert kinds(plan, "tp")["all_reduce"] + kinds(plan, "tp")["reduce_scatter"] == 2
    assert not [c.value for c in plan.collectives if c.value.endswith("weight")]


def layouts_by_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The layouts in which transformers' styles distribute the parameters that the model's ``tp_plan`` names."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")

        def note(tensor: Tensor, mesh: Any, placements: Any, name: str = name, dims: int = parameter.dim(), **_: Any) -> Tensor:
            found[name] = str(Layout([Shard(p.dim % dims) if p.is_shard() else p for p in placements]))
            return tensor

        monkeypatch.setattr("transformers.distributed.tensor_parallel.distribute_tensor", note)
        style = model.tp_plan.get(replace_layer_number_by_wildcard(module))
        if style is not None:
            ALL_PARALLEL_STYLES[style].shard_param(copy.deepcopy(model.get_submodule(module)), kind, None)
            found.setdefault(name, "R")
    return found


def test_a_models_own_tp_plan_names_its_head_and_embedding(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "use_cache": False}
    torch.manual_seed(0)
    model, tokens = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).double().eval(), torch.arange(12).reshape(2, 6)
    plan = fxshard.plan(model, (tokens,), fxshard.Mesh({"tp": 2}), train=False, parallel={"tp": model.tp_plan}, cache=False)
    want = layouts_by_transformers(model, monkeypatch)
    assert {name: str(plan.specs[name.replace(".", "_")].outputs[0]) for name in want} == want
    assert want["lm_head.weight"] == want["model.embed_tokens.weight"] == "S(0)" and len(want) == 15
    assert str(plan.specs["output"].inputs[0]) == "R"  # colwise_gather_output
    assert not [r for r in caplog.records if "matches no module" in r.message]
    out = fxshard.simulate(model, (tokens,), plan).outputs
    torch.testing.assert_close(out.logits, model(tokens).logits.detach(), rtol=1e-9, atol=1e-9)


def test_a_mask_before_the_batch_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    shapes = {"mask": (1, 1, 6, 6), "tokens": (8, 6), "factor": ()}
    found = of_inputs({"dp": DataParallel()}, shapes)
    assert {name: str(placed["dp"]) for name, placed in found.items()} == {"mask": "R", "tokens": "S(0)", "factor": "R"}
    assert not caplog.records
    of_inputs({"dp": DataParallel()}, {"tokens": ()})
    assert not caplog.records
    of_inputs({"cp": ContextParallel(dim=2)}, {"tokens": (8, 6)})
    assert "no input is sharded along cp: ContextParallel shards dim 2" in caplog.text


@pytest.mark.parametrize("dim", ["0", None, -1, True, 1.0])
@pytest.mark.parametrize("word", [FullyShard, HybridShard, ContextParallel])
def test_a_dim_is_a_number_from_0_on(word: Any, dim: Any) -> None:
    with pytest.raises(OptionError, match=f"{word.__name__} shards along a dim, not "):
        word(dim=dim)


def test_styles_that_say_nothing_of_weights_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fxshard")
    read_parallel({"tp": {"layers.*.experts": "moe_tp_experts", "lm_head": "colwise"}}, fxshard.Mesh({"tp": 2}))
    assert "the solver shards what a tp_plan calls moe_tp_experts" in caplog.text


def test_every_style_of_transformers_has_an_entry() -> None:
    assert set(STYLES) == set(ALL_PARALLEL_STYLES.keys())


def test_a_parameter_with_one_element_along_the_dim_stays_whole() -> None:
    """As the class token of a ViT, [1, 1, hidden]."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.zeros(1, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift)

    plan = fxshard.plan(Shifted(), (torch.randn(4, 8),), fxshard.Mesh({"dp": 2}), parallel=FullyShard(), cache=False)
    assert [str(plan.specs[name].outputs[0]) for name in ("shift", "linear_weight")] == ["R", "S(0)"]


def test_styles_that_match_nothing_or_cannot_be_laid_out_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = hugging_face(use_cache=False)
    styles = {"layers.*.self_attn.qkv_proj": "packed_colwise", "layers.*.self_attn.q_proj": "packed_colwise"}
    fxshard.plan(model, (tokens,), fxshard.Mesh({"tp": 2}), train=False, parallel={"tp": styles}, cache=False)
    said = " ".join(r.getMessage() for r in caplog.records)
    assert "'layers.*.self_attn.qkv_proj', which matches no module" in said and "does not take" in said
    assert re.search(r"which matches no module or parameter of the model; did you mean '[a-z.]*layers.\d.self_attn.\w+_proj'", said)


def test_what_is_pinned_counts_instead() -> None:
    plan = planned({"dp": 2}, FullyShard(), pins={"output.weight": "R", "layers.0.attention.wq.weight": "S(1)"}, input_layouts="R")
    found = {name: str(plan.specs[name].outputs[0]) for name in ("output_weight", "layers_0_attention_wq_weight", "args_0", "norm_weight")}
    assert found == {"output_weight": "R", "layers_0_attention_wq_weight": "S(1)", "args_0": "R", "norm_weight": "S(0)"}


@pytest.mark.parametrize(
    ("axes", "parallel", "what"),
    [
        ({"dp": 2, "tp": 2}, FullyShard(), "does not say for which axis, and the mesh has dp, tp"),
        ({"dp": 2}, {"dpp": FullyShard()}, "no axis 'dpp'.*dp"),
        ({"dp": 2}, {"dp": "fsdq"}, "'fsdq', given for 'dp'(.|\\n)*fsdp"),
        ({"tp": 2}, {"layers.*.attention.wq": "colwse"}, "'colwse' is not a style(.|\\n)*colwise"),
        ({"tp": 2}, {"tp": {"layers.*.attention.wq": ColwiseParallel()}}, "torch's styles are applied by fxshard.parallelize_module"),
        ({"dp": 2}, {"dp": HybridShard()}, "HybridShard is for two axes"),
    ],
)
def test_refused(axes: dict[str, int], parallel: Any, what: str) -> None:
    with pytest.raises(FxshardError, match=what):
        planned(axes, parallel)


def test_a_contradiction_names_the_word() -> None:
    forbidden = [fxshard.Forbid("output.weight", "S(0)")]
    with pytest.raises(FxshardError, match=r"parallel=\{'dp': FullyShard\(dim=0\)\} for output.weight"):
        planned({"dp": 2}, FullyShard(), constraints=forbidden)


def test_a_contradiction_names_the_entry_of_a_tp_plan() -> None:
    styles = {"layers.*.attention.w[qkv]": "colwise", "layers.*.attention.wo": "rowwise", "output": "colwise"}
    with pytest.raises(FxshardError, match=r"parallel=\{'tp': \{'output': 'colwise'\}\} for output.weight"):
        planned({"tp": 2}, {"tp": styles}, constraints=[fxshard.Forbid("output.weight", "S(0)")])


def test_a_wildcard_of_names_stands_for_one_part() -> None:
    """As in torch's ``parallelize_module``; the name of the base model may be left out, as in a ``tp_plan``."""
    (plan,) = read_parallel({"layers.*.proj": "colwise", "w[12]": "rowwise"}, fxshard.Mesh({"tp": 2})).values()
    placements = {name: plan.parameter(name, (4, 4)) for name in ("layers.0.proj.weight", "model.layers.0.proj.weight", "mlp.w2.weight")}
    assert placements == {"layers.0.proj.weight": Shard(0), "model.layers.0.proj.weight": Shard(0), "mlp.w2.weight": Shard(1)}
    assert all(
        plan.parameter(name, (4, 4)) is None for name in ("layers.0.inner.proj.weight", "proj.weight", "mlp.w3.weight", "mlp.aw2.weight")
    )


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "cp": 2}])
@pytest.mark.parametrize("word", [FullyShard(), DataParallel()])
def test_a_batch_of_one_row(axes: dict[str, int], word: Any) -> None:
    """No rule shards its dim of one element; the plan is the word's for parameters, and every rank computes the row."""
    model, tokens = torch.nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double(), torch.arange(6)[None]
    words = {"dp": word} | ({"cp": ContextParallel()} if "cp" in axes else {})
    plan = fxshard.plan(model, (tokens,), fxshard.Mesh(axes), parallel=words, cache=False)
    simulation = fxshard.simulate(model, (tokens,), plan)
    want = model(tokens)
    want.sum().backward()
    torch.testing.assert_close(simulation.outputs, want, rtol=1e-9, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(simulation.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert (plan.layout_of("1.weight")[0] == Shard(0)) == isinstance(word, FullyShard)
