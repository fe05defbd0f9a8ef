"""The tangents on which gradients depend, against autograd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxshard import archive
from fxshard.archive.description import read_description, write_description
from fxshard.errors import FileError
from fxshard.graph.tangents import outputs_with_tangents
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace


class Chains(nn.Module):
    """The first output reads ``a``, the second ``a`` and ``b``, the third ``c``, through a view and an in-place write."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = x @ self.a
        third = torch.zeros(4, 4)
        third[1:] += self.c[:3]
        return first, first.detach() @ self.b + x @ self.a, third


def follows_by_autograd(model: nn.Module, x: Tensor) -> dict[str, set[str]]:
    """Parameter -> the tangents of the outputs that give it a gradient."""
    found: dict[str, set[str]] = {}
    for i, output in enumerate(model(x)):
        grads = torch.autograd.grad(output.sum(), list(model.parameters()), allow_unused=True)
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            found.setdefault(name, set()).update({f"tangents[{i}]"} if grad is not None else set())
    return found


def test_gradients_follow_the_outputs_that_autograd_says(tmp_path: Path) -> None:
    model, x = Chains(), torch.randn(4, 4)
    graph = trace(model, (x,))
    said = {end.name: set(end.follows or ()) for end in outputs_with_tangents(graph) if end.kind == "gradient"}
    assert said == follows_by_autograd(model, x)
    program = lower(graph, plan_graph(graph, Mesh({"a": 2}), Request()))
    archive.save(program, tmp_path / "program.pt2")
    assert archive.load(tmp_path / "program.pt2").outputs == program.outputs == outputs_with_tangents(graph)


def test_a_file_that_names_an_unknown_tangent_is_refused() -> None:
    graph = trace(Chains(), (torch.randn(4, 4),))
    program = lower(graph, plan_graph(graph, Mesh({"a": 2}), Request()))
    said = json.loads(write_description(program, dict.fromkeys(program.modules, "graph")))
    next(end for end in said["outputs"] if "follows" in end)["follows"] = ["tangents[9]"]
    with pytest.raises(FileError, match=r"tangents\[9\]"):
        read_description(json.dumps(said).encode(), "a file")


def test_one_output_needs_no_word() -> None:
    """All gradients follow its tangent: files of such programs stay as they were."""
    graph = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert outputs_with_tangents(graph) == graph.outputs
