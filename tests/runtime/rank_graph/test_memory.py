"""The memory of a rank during an eager step: nothing lives longer than it is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fxshard
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.mesh.mesh import Mesh
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.rank_graph.memory import program_memory, unbound
from fxshard.testing.memory import MemoryRecorder

MB = 2**20


class Deep(nn.Module):
    """Twelve products of 1 MB that each save an operand, a mask without gradient, and a second differentiable output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((512, 512), 1.01))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x @ self.w
        for _ in range(12):
            x = x @ self.w
        return x.mean(), x > 0, (self.w * 3).sum()


def deep() -> tuple[Deep, torch.Tensor, ShardedProgram]:
    model, x = Deep(), torch.full((512, 512), 0.001)
    plan = fxshard.plan(model, (x,), Mesh({"a": 1}))
    return model, x, fxshard.lower(model, (x,), plan)


def compiled(program: ShardedProgram) -> CompiledProgram:
    return compile_program(unbound(program), "eager")


def test_results_that_are_not_differentiated_count_as_zero() -> None:
    model, x, program = deep()
    run = compiled(program)
    loss, mask, side = run([model.w, x])
    assert not mask.requires_grad
    (grad,) = torch.autograd.grad(loss, [model.w], retain_graph=True)
    (other,) = torch.autograd.grad(side, [model.w])
    want = torch.autograd.grad(model(x)[0], [model.w])[0]
    torch.testing.assert_close(grad, want)
    torch.testing.assert_close(other, torch.full_like(other, 3.0))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [model.w])


class Trace(MemoryRecorder):
    """Records the live bytes after each matmul."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        self.trace: list[int] = []
        super().__init__(given)

    def follow(self, *tensors: torch.Tensor, op: str = "given") -> None:
        super().follow(*tensors, op=op)
        self.trace += [self.alive] if op == "aten.mm.default" else []


def test_the_backward_frees_saved_values_as_it_goes() -> None:
    model, x, program = deep()
    run = compiled(program)
    with Trace([model.w, x]) as recorder:
        loss = run([model.w, x])[0]
        assert 14 * MB < recorder.alive < 15 * MB, "the weight, the input, twelve products"
        loss.backward()
    assert recorder.trace[-1] < 7 * MB


def test_optimizer_state_counts_for_trained_parameters_only() -> None:
    _, _, program = deep()
    plain, adam = (program_memory(program, optimizer) for optimizer in ("none", "adam"))
    assert adam.peak - plain.peak == 2 * MB and adam.by_kind()["optimizer"] == 2 * MB
    half = program_memory(program, Optimizer("adam", torch.bfloat16, master_weights=True))
    assert half.peak - plain.peak == MB
    fixed = dataclasses.replace(program, outputs=tuple(dataclasses.replace(o, kind="output") for o in program.outputs))
    assert "optimizer" not in program_memory(fixed, "adam").by_kind()
