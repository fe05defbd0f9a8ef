"""The lowered program keeps to the memory limit, by prediction and in eager execution."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, Case, make

from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.pipeline import lower_plan as lower
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import measure_memory


class Words(nn.Module):
    """A small language model with a large vocabulary: most of its memory is logits, and the loss and its gradient make more."""

    def __init__(self, words: int = 4000, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, dim), nn.Linear(dim, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def words() -> Case:
    return Words(), (torch.randint(0, 4000, (4, 8)),), {}


CASES = [
    ("mlp", "a=2", "adam", 0.65),
    ("cnn", "a=2", "sgd", 0.65),
    ("llama_batch5", "a=2", "adam", 0.8),
    ("words", "a=2,b=2", "sgd", 0.6),
    ("words", "a=2", "sgd", 0.9),
]


@pytest.mark.parametrize(("name", "mesh", "optimizer", "share"), CASES)
def test_the_program_keeps_to_the_limit(name: str, mesh: str, optimizer: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a share of the unlimited plan's memory. The index of a rank on an axis, 8 bytes, is not counted."""
    monkeypatch.setitem(MODELS, "words", words)
    model, args, kwargs = make(name, torch.float32)
    graph, where = trace(model, args, kwargs), parse_mesh(mesh)
    free = plan_graph(graph, where, Request(optimizer=optimizer, cache=False))
    limit = int(share * sum(free.memory.values()))
    plan = plan_graph(graph, where, Request(memory_limit=limit, optimizer=optimizer, time_limit=3, cache=False))
    program = lower(graph, plan)
    profile = program_memory(program, optimizer)
    places = sum(t.bytes for t in profile.alive() if t.bytes == 8 and not t.shape)
    assert profile.peak - places <= limit < program_memory(lower(graph, free), optimizer).peak
    held = measure_memory(program, program_values(program, model, args, kwargs)).peak + plan.memory.get("optimizer", 0)
    assert held - places <= limit
