"""A step whose microbatches have other sizes than the example is refused by name, in training and in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import fxshard
from fxshard.errors import SizesError
from fxshard.pipelines.stage import ShardedStage
from tests.distributed.scenarios import on_ranks

pytestmark = pytest.mark.distributed


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(12, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        x = self.embedding(tokens) * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch(rows: int, length: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 12, (rows, length)), torch.rand(rows, 1, 1)


def made(model: nn.Module, microbatches: int = 2) -> ShardedStage:
    """Planned for microbatches of two rows."""
    tokens, scale = batch(2)
    device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    options = {"example_kwargs": {"scale": scale}, "compiler": "eager", "cache": False}
    return fxshard.pipeline(model, (tokens,), device_mesh, microbatches=microbatches, **options)


def step(runs: Any, stage: ShardedStage, tokens: Tensor, scale: Tensor, evaluates: bool) -> Any:
    call = runs.eval if evaluates else runs.step
    if stage.is_first:
        return call(tokens, scale=scale)
    return call() if evaluates else call(target=tokens)


REFUSED = {
    r"'tokens' has the shape \(3, 5\) in microbatch 0, and the pipeline is planned for \(2, 5\)(.|\n)*so pass 4 rows": (batch, 6),
    r"'tokens' has the shape \(1, 5\) in microbatch 0, and the pipeline is planned for \(2, 5\)(.|\n)*pad or drop the last batch": (
        batch,
        2,
    ),
    r"'tokens' has the shape \(2, 7\) in microbatch 0": (lambda rows: (batch(rows, 7)[0], batch(rows)[1]), 4),
    r"'scale' has the shape \(2, 2, 1\) in microbatch 0": (lambda rows: (batch(rows)[0], torch.ones(rows, 2, 1)), 4),
}


def refused(evaluates: bool) -> None:
    """Nothing has been sent or computed: the next step of the right size works."""
    torch.manual_seed(0)
    model = Scores()
    reference = copy.deepcopy(model)
    stage = made(model)
    runs = (ScheduleGPipe if evaluates else Schedule1F1B)(stage, n_microbatches=2, loss_fn=None if evaluates else loss)
    found = step(runs, stage, *batch(4), evaluates)  # the first step of a schedule has a vote of all stages
    for said, (give, rows) in REFUSED.items() if stage.is_first else ():
        with pytest.raises(SizesError, match=said):
            step(runs, stage, *give(rows), evaluates)
    stage.submod.zero_grad()
    found = step(runs, stage, *batch(4), evaluates)
    tokens, scale = batch(4)
    want = reference(tokens, scale)
    if evaluates and stage.is_last:
        torch.testing.assert_close(found, want)
    if not evaluates:
        torch.stack([loss(a, b) for a, b in zip(want.chunk(2), tokens.chunk(2), strict=True)]).mean().backward()
        for name, parameter in stage.submod.named_parameters():
            gradient: Any = parameter.grad
            torch.testing.assert_close(gradient.full_tensor(), reference.get_parameter(name).grad)


def in_training() -> None:
    refused(evaluates=False)


def in_evaluation() -> None:
    refused(evaluates=True)


def only_the_last_is_smaller() -> None:
    """The first microbatch has the planned size; the smaller one is refused in its turn."""
    stage = made(Scores())
    for evaluates in (False, True):
        runs = Schedule1F1B(stage, n_microbatches=2, loss_fn=None if evaluates else loss)
        step(runs, stage, *batch(4), evaluates)
        if stage.is_first:
            tokens, scale = batch(3)
            stage.clear_runtime_states()
            stage.forward_one_chunk(0, (tokens[:2],), {"scale": scale[:2]})
            with pytest.raises(SizesError, match=r"'tokens' has the shape \(1, 5\) in microbatch 1(.|\n)*microbatch 1 of 2"):
                stage.forward_one_chunk(1, (tokens[2:],), {"scale": scale[2:]})
            stage.clear_runtime_states()


def values_from_the_stage_before() -> None:
    stage = made(Scores())
    if stage.is_last:
        with pytest.raises(SizesError, match=r"the values from the stage before have the shape \(1, 5, 8\), and .* for \(2, 5, 8\)"):
            stage.forward_maybe_with_nosync(torch.ones(1, 5, 8))


found, test_two_ranks = on_ranks(2, in_training, in_evaluation, only_the_last_is_smaller, values_from_the_stage_before)
