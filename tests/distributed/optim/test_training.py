"""Models train on ranks as on one device: with Megatron's layouts and random plans, eager in float64 and Inductor in float32."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.distributed.scenarios import run_scenarios
from tests.distributed.training import Case, check, on_ranks, plan_of, simulated

pytestmark = pytest.mark.distributed

MLP = {"pins": {"up.*.weight": {"tp": Shard(0)}, "down.*.weight": {"tp": Shard(1)}}}
LLAMA = {
    "pins": {
        "layers.*.attention.w[qkv].weight": {"tp": Shard(0)},
        "layers.*.attention.wo.weight": {"tp": Shard(1)},
        "layers.*.feed_forward.w[13].weight": {"tp": Shard(0)},
        "layers.*.feed_forward.w2.weight": {"tp": Shard(1)},
    }
}
VOCABULARY = {
    "pins": {"tok_embeddings.weight": {"tp": Shard(0)}, "output.weight": {"tp": Shard(0)}, "cross_entropy_backward": {"tp": Shard(1)}}
}
DATA = {"input_layouts": {"args[0]": {"dp": Shard(0)}}}
FLOAT = {"dtype": torch.float32, "compiler": "inductor"}

TWO = {
    "mlp_tp": Case("mlp", "tp=2", MLP),
    "llama_tp": Case("llama", "tp=2", LLAMA),
    "mlp_random": Case("mlp_batch5", "a=2", seed=1),
    "llama_random": Case("llama_batch5", "a=2", seed=2),
    "cnn_random": Case("cnn", "a=2", seed=0),
    "llama_frugal": Case("llama", "a=2", seed=3, frugal=True),
    "mlp_frugal_inductor": Case("mlp", "a=2", seed=4, frugal=True, **FLOAT),
    "mlp_random_inductor": Case("mlp_batch5", "a=2", seed=1, **FLOAT),
    "llama_vocabulary_inductor": Case("llama", "tp=2", VOCABULARY, **FLOAT),
    "bert": Case("bert_one_layer", "dp=2", {"input_layouts": "S(0)"}),
}
FOUR = {
    "mlp_dp_tp": Case("mlp", "dp=2,tp=2", {**MLP, **DATA}),
    "mlp_random": Case("mlp_batch5", "a=2,b=2", seed=2),
    "cnn_random": Case("cnn", "a=2,b=2", seed=1),
    "mlp_inductor": Case("mlp", "dp=2,tp=2", {**MLP, **DATA}, **FLOAT),
}


# TWO and FOUR have one compiler for each of these; the sweep adds the other one.
OTHERWISE = {
    "llama_inductor": Case("llama", "tp=2", LLAMA, **FLOAT),
    "llama_vocabulary": Case("llama", "tp=2", VOCABULARY),
    "mlp_inductor": Case("mlp", "tp=2", MLP, **FLOAT),
}
SWEEP = {
    2: OTHERWISE
    | {
        name: Case(name, "dp=2", {"input_layouts": "S(0)"}, **FLOAT)
        for name in ("mlp", "llama", "gpt2", "bert", "vit", "cnn", "llama_batch5")
    },
    4: {
        name: Case(name, "dp=2,tp=2", {"input_layouts": "S(0)R"}, **FLOAT)
        for name in ("mlp", "llama", "gpt2", "bert", "vit", "cnn", "llama_batch5")
    },
}


def on_this_rank(case: Case, plan_json: str) -> None:
    check(case, functools.partial(on_ranks, plan_json))


def scenario(case: Case) -> functools.partial[None]:
    """Trains ``case`` on each rank, with the plan of this process."""
    return functools.partial(on_this_rank, case, plan_of(case).to_json())


@pytest.fixture(scope="module", params=(2, 4))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error text of each case at one number of ranks, empty if it passed."""
    cases = {2: TWO, 4: FOUR}[request.param]
    scenarios = {name: scenario(case) for name, case in cases.items()}
    folder: Path = tmp_path_factory.mktemp("ranks")
    return {f"{request.param}-{name}": said for name, said in run_scenarios(scenarios, request.param, folder, seconds=900).items()}


def test_on_ranks(found: dict[str, str]) -> None:
    failed = {name: said for name, said in found.items() if said}
    assert not failed, "\n\n".join(f"{name}\n{said}" for name, said in failed.items())


@pytest.mark.parametrize(
    "case",
    [c for c in (*TWO.values(), *FOUR.values(), OTHERWISE["llama_vocabulary"]) if c.dtype == torch.float64],
    ids=lambda c: f"{c.model}-{c.mesh}",
)
def test_simulated(case: Case) -> None:
    """The same check with all ranks simulated in this process."""
    check(case, simulated)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in SWEEP.items() for name in cases])
def test_sweep(world: int, name: str, tmp_path: Path) -> None:
    """Every model with its batch sharded, through Inductor, three steps."""
    said = run_scenarios({name: scenario(SWEEP[world][name])}, world, tmp_path, seconds=900)
    assert not said[name], said[name]
