"""Inductor's code allocates no more than the predicted peak of eager execution, both measured by the CPU allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from equality import mesh_of
from torch import nn

from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import measure_allocated


class Convolutions(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), targets)


def convolutions() -> zoo.Case:
    return Convolutions(), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))), {}


def llama() -> zoo.Case:
    """Large enough that activations dominate the few that one fused kernel reads at a time."""
    tokens = torch.randint(0, 1024, (4, 128))
    return zoo.Llama.small(dim=256, ffn=512, vocab=1024, layers=4), (tokens, tokens.roll(-1, 1)), {}


SLOW = pytest.mark.slow
WIDE = [pytest.param(make, mesh, marks=SLOW) for make in (convolutions, llama, zoo.gpt2) for mesh in ("a=2", "a=2,b=2")]
CASES = [(zoo.MODELS["mlp"], "a=2"), *WIDE]


@pytest.mark.parametrize(("make", "mesh"), CASES)
def test_the_compiled_peak_is_within_the_predicted_one(make: Callable[[], zoo.Case], mesh: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = make()
    graph = trace(model, args, kwargs, train=True)
    program = lower(graph, plan_graph(graph, mesh_of(mesh), Request()))
    values = program_values(program, model, args, kwargs)
    allocated = {c: measure_allocated(program, values, compiler=c).peak for c in ("inductor", "eager")}
    predicted = program_memory(program).peak
    assert allocated["inductor"] <= predicted
    assert allocated["eager"] == pytest.approx(predicted, rel=0.1)
