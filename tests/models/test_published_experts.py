"""transformers' own mixtures under ExpertParallel: rows travel to the ranks of their experts, and numbers are those of one device."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.parallel import read_parallel
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 1, "use_cache": False, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=64, head_dim=8),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES, **LATENT, n_routed_experts=4, moe_intermediate_size=64, n_group=2, topk_group=1, first_k_dense_replace=0
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_travel_to_their_experts(name: str) -> None:
    """The model casts to float32 here and there: sums in another order differ in the seventh digit. One device runs experts one by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).double()
    ids = torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    kwargs = {"input_ids": ids, "labels": ids}
    single = copy.deepcopy(model)
    single.set_experts_implementation("eager")
    graph, mesh = trace(model, (), kwargs), fxshard.Mesh({"ep": 2})
    plan = plan_graph(graph, mesh, Request(parallel=read_parallel("ep", mesh), objective="communication"))
    kinds = Counter(c.kind for c in plan.collectives)
    assert kinds["dispatch"] == kinds["combine"] == 2, kinds  # forward and backward
    layouts = {e.name: str(plan.specs[e.node].outputs[0]) for e in graph.inputs_of("parameter")}
    assert {name for name, layout in layouts.items() if layout != "R"} == {name for name in layouts if ".experts." in name}
    program = lower_plan(graph, plan)
    found = simulate_program(program, program_values(program, model, (), kwargs))
    assert_equal_to_one_device(found, one_device(single, (), kwargs), rtol=1e-5)


class Loop(nn.Module):
    """A dropless mixture in plain torch: each expert takes the rows of the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(4, 2), nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        y = torch.zeros_like(x)
        for expert, matrix in enumerate(self.experts):
            token, choice = torch.where(chosen == expert)
            y = y.index_add(0, token, (x[token] @ matrix).relu() * weights[token, choice].unsqueeze(-1))
        return y


class Split(Loop):
    """As many rows for each expert as the data says, read by the host."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort(stable=True)
        parts = x[order].split(chosen.bincount(minlength=2).tolist())
        return torch.zeros_like(x).index_add(0, order, torch.cat([part @ matrix for part, matrix in zip(parts, self.experts, strict=True)]))


def test_a_loop_over_experts_runs_whole_on_each_rank() -> None:
    model, x = Loop().double(), torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = fxshard.plan(model, (x,), fxshard.Mesh({"ep": 2}), parallel={"ep": "ep"}, cache=False)
    assert str(plan.specs["experts"].outputs[0]) == str(plan.specs["args_0"].outputs[0]) == "S(0)"
    whole = dict(plan.fallbacks)
    assert whole["nonzero"] == "it returns a tensor whose size is known only at run time" and {"index", "index_add"} < set(whole)
    assert_equal_to_one_device(fxshard.simulate(model, (x,), plan), one_device(model, (x,), {}))


def test_numbers_of_rows_read_by_the_host_are_refused() -> None:
    with pytest.raises(TraceError, match=r"(?s)data-dependent(.*)\.tolist\(\)"):
        fxshard.plan(Split(), (torch.randn(6, 4),), fxshard.Mesh({"ep": 2}), cache=False)
