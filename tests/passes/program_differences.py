"""A lowered program in the simulator, compared with the same model on one device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values


def differences(program: ShardedProgram, model: nn.Module, args: Any, kwargs: Any) -> float:
    """The largest relative difference between a gradient and that of one device; the tangents are ones."""
    model.zero_grad()
    out = model(*args, **kwargs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.sum().backward()
    result = simulate_program(program, program_values(program, model, args, kwargs))
    assert [(c.kind, c.axis, c.shape) for c in result.collectives] == [(c.kind, c.axis, c.shape) for c in program.collectives]
    norm = sum(float(p.grad.norm() ** 2) for p in model.parameters() if p.grad is not None) ** 0.5
    return max(float((result.grads[n] - p.grad).norm()) / norm for n, p in model.named_parameters() if p.grad is not None)


def traffic(program: ShardedProgram) -> Counter[tuple[str, str]]:
    """Bytes of the collectives, by kind and mesh axis."""
    found: Counter[tuple[str, str]] = Counter()
    for c in program.collectives:
        found[c.kind, c.axis] += c.bytes
    return found
