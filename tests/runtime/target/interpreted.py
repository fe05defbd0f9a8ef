"""Runs a small model's program for an absent GPU on the CPU: its Triton kernels in Triton's interpreter, calls of libraries in aten.

A script for a process of its own, with TRITON_INTERPRET=1: prints each result's and gradient's largest error against the same program
run eagerly, and the functions that the interpreter lacks, as JSON.
"""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-not-found]  # in .triton
from torch import nn

import fxshard
from fxshard._torch_compat.inductor.without_gpu import without_gpu
from fxshard.mesh.mesh import parse_mesh
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.rank_graph.fake_ranks import fake_ranks
from fxshard.runtime.rank_graph.memory import unbound
from fxshard.runtime.ranks.watchdog import Watchdog
from fxshard.runtime.simulate.shards import scatter
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import SingleRankCollectives

KERNELS: set[str] = set()
MISSING: set[str] = set()


class Perceptron(nn.Module):
    """Embedding, norm, two products, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), target.flatten())


class Gated(nn.Module):
    """Rotary positions, attention by products and softmax, a gated perceptron with an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48, bias=False), nn.RMSNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(1, 5, dtype=x.dtype)
        q, k = (torch.cat((h[..., :4] * angle.cos() - h[..., 4:] * angle.sin(), h[..., 4:]), -1) for h in (q, k))
        x = x + ((q @ k.mT) / 8**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(-2)
        h = self.norm(x)
        return (x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))).square().mean()


MODELS = {
    "perceptron": (Perceptron, lambda: (torch.randint(32, (4, 6)), torch.randint(32, (4, 6)))),
    "gated": (Gated, lambda: (torch.randn(4, 6, 16),)),
}


class _Libdevice:
    """NVIDIA's mathematical functions, which the interpreter does not call, by Triton's own."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(tl.math, name):
            MISSING.add(name)
        return getattr(tl.math, name)


def run_wrapper(source: str) -> Any:
    """The function of a wrapper, with its kernels interpreted and its memory on the CPU."""
    module = types.ModuleType("wrapper")
    exec(source, module.__dict__)
    module.__dict__["empty_strided_cuda"] = module.__dict__["empty_strided_cpu"]
    for name, value in list(vars(module).items()):
        if hasattr(value, "run") and hasattr(value, "fn"):
            KERNELS.add(name)
            value.fn.fn.__globals__["libdevice"] = _Libdevice()
    return module.__dict__["call"]


def main(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, args = make(), inputs()
    program = fxshard.lower(model, args, fxshard.plan(model, args, parse_mesh("dp=2,tp=2", "h100"), parallel={"dp": "fsdp", "tp": "auto"}))
    coordinate = (1, 0)
    values = program_values(program, model, args)
    with without_gpu("sm_90", run_wrapper), fake_ranks(program, coordinate, "cuda") as bound:
        artefact = compile_program(bound, "inductor", cache=False).artefact
        onto_cpu = replace(bound, device=torch.device("cpu"))
        interpreted = CompiledProgram(onto_cpu, lambda: artefact, Watchdog(onto_cpu))
        found = step(interpreted, program, values, coordinate)
    expected = step(compile_program(unbound(program, coordinate), "eager"), program, values, coordinate)
    errors = [float((a - b).abs().max() / (b.abs().max() + 1e-12)) for a, b in zip(found, expected, strict=True)]
    print(json.dumps({"errors": errors, "kernels": sorted(KERNELS), "missing": sorted(MISSING)}))


def step(compiled: Any, program: Any, values: list[torch.Tensor], coordinate: tuple[int, ...]) -> list[torch.Tensor]:
    """Results and gradients of one step of a rank."""
    graded = {o.name for o in program.outputs if o.kind == "gradient"}
    inputs: list[torch.Tensor] = []
    tangents: list[torch.Tensor] = []
    for end, value, layout in zip(program.inputs, values, program.input_layouts, strict=True):
        local = scatter(value.detach(), layout, program.mesh, coordinate).clone()
        (tangents if end.kind == "tangent" else inputs).append(local.requires_grad_(end.name in graded))
    with SingleRankCollectives():
        results = compiled(inputs)
        torch.autograd.backward([r for r in results if r.requires_grad], tangents)
    gradients = [x.grad for x in inputs if x.grad is not None]
    assert len(gradients) == len(graded)
    return [r.detach() for r in results] + gradients


if __name__ == "__main__":
    main(sys.argv[1])
