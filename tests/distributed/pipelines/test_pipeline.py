"""Two stages of two ranks each train as one device does."""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import OptionError, PlanError, RunError
from fxshard.pipelines.stage import ShardedStage
from fxshard.runtime.ranks.record import record_collectives
from tests.distributed.scenarios import on_ranks
from tests.pipelines.test_split import Net, Repeated

pytestmark = pytest.mark.distributed
MICROBATCHES = 4


class Logits(Net):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        first = x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles.cos(), torch.zeros((), dtype=torch.bool), first)
        return self.head(x)


class Loss(Net):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*args)[0]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def same(have: Tensor, want: Tensor, what: str) -> None:
    full = have.full_tensor() if isinstance(have, DTensor) else have
    error = float((full - want).detach().norm())
    assert error <= 1e-9 * float(want.norm()), f"{what} is off by {error:.3g}"


def trained(
    model: Net, make: Any, schedule: Any, loss: Callable[..., Tensor], inputs: int, clip: tuple[float, ...] | None = None, **options: Any
) -> tuple[ShardedStage, Counter[str]]:
    """Trains three steps on both; the first ``inputs`` of the batch's tensors go to the first stage, the last one is the target."""
    reference = copy.deepcopy(model)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(1)
    batch = (torch.randint(0, 11, (8, 5)), torch.rand(8, 5) > 0.3, torch.randint(0, 11, (8, 5)))
    given = batch[:inputs]
    example = tuple(x[: 8 // MICROBATCHES] for x in given)
    name = schedule.__name__.removeprefix("Schedule")  # as pipeline calls it
    stage = fxshard.pipeline(model, example, device_mesh, microbatches=MICROBATCHES, schedule=name, compiler="eager", **options)
    stages = stage.rank_stages
    optimizers = [make([p for one in stages for p in one.submod.parameters()]), make(reference.parameters())]
    runs = schedule(stage if len(stages) == 1 else list(stages), n_microbatches=MICROBATCHES, loss_fn=loss)
    for _ in range(3):
        losses: list[Tensor] = []
        runs.step(*given) if stage.is_first else runs.step(target=batch[2], losses=losses, return_outputs=False)
        pieces = [loss(reference(*(x[i : i + 2] for x in given)), batch[2][i : i + 2]) for i in range(0, 8, 2)]
        torch.stack(pieces).mean().backward()
        for have, want in zip(losses, pieces, strict=stages[-1].is_last):
            same(have, want.detach(), "the loss")
        if clip is not None:
            want = torch.nn.utils.clip_grad_norm_(reference.parameters(), *clip)
            same(stage.clip_grad_norm_(*clip), want, "the norm of all stages")
        for one in optimizers:
            one.step()
            one.zero_grad()
    expected, have = reference.state_dict(), {key: value for one in stages for key, value in one.submod.state_dict().items()}
    assert have.keys() <= expected.keys()
    for key, value in have.items():
        same(value, expected[key], key)
    held: list[Any] = [None] * 4
    dist.all_gather_object(held, sorted(have))
    assert set(held[0]) | set(held[2]) == set(expected) and held[0] == held[1] and held[2] == held[3]
    with record_collectives() as recorded:
        runs.step(*given) if stage.is_first else runs.step(target=batch[2], return_outputs=False)
    logits = runs.eval(*given) if stage.is_first else runs.eval(target=batch[2], return_outputs=inputs == 1)
    if stages[-1].is_last and inputs == 1:
        same(logits, reference(*given).detach(), "an output of eval()")
    return stage, Counter(one.kind for one in recorded)


def fully_sharded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    words = {"dp": fxshard.FullyShard()}
    stage, kinds = trained(
        Logits(), torch.optim.AdamW, Schedule1F1B, mean_loss, 1, parallel=words, optimizer="adamw", memory_limit=24_400, clip=(0.01,)
    )
    planned, own = stage.plan.stages[stage.stage_index], stage.submod.forward.programs[0].plan  # type: ignore[union-attr]
    assert planned.memory_limit == own.memory_limit and planned.memory <= 24_400
    assert sum(own.memory.values()) <= own.memory_limit < 24_400
    assert kinds["reduce_scatter"] + kinds["all_reduce"] == len(list(stage.submod.parameters())), "once a step, not for each microbatch"
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(stage.submod.state_dict(), checkpoint_id=folder[0])
    whole = Logits()
    fxshard.load_checkpoint(folder[0], whole)
    for name, value in stage.submod.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value.full_tensor() if isinstance(value, DTensor) else value), name


def interleaved() -> None:
    """Four stages on two ranks of the pipeline's axis."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    words = {"dp": fxshard.FullyShard()}
    stage, kinds = trained(Logits(), torch.optim.AdamW, ScheduleInterleaved1F1B, mean_loss, 1, parallel=words, clip=(0.01,))
    assert [one.stage_index for one in stage.rank_stages] == [stage.stage_index, stage.stage_index + 2] and len(stage.plan.stages) == 4
    parameters = [p for one in stage.rank_stages for p in one.submod.parameters()]
    assert kinds["reduce_scatter"] + kinds["all_reduce"] == len(parameters), "once a step, not for each microbatch"


def tensor_parallel() -> None:
    """The model computes the loss; a skip connection, a mask and the targets pass from stage to stage."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trained(Loss(), sgd, ScheduleGPipe, lambda loss, _: loss, 3, clip=(0.5, math.inf), parallel={"dp": fxshard.TensorParallel()})


def repeated() -> None:
    """Each layer is called twice, within its stage."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    trained(Repeated(), torch.optim.AdamW, Schedule1F1B, mean_loss, 1, parallel={"dp": fxshard.FullyShard()}, cache=False)


def refused() -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, tokens = Logits(), torch.randint(0, 11, (2, 5))
    with pytest.raises(OptionError, match="pipeline has no option 'pins'"):
        fxshard.pipeline(model, (tokens,), device_mesh, microbatches=4, pins={})
    with pytest.raises(OptionError, match="copied again for every microbatch"):
        fxshard.pipeline(model, (tokens,), device_mesh, microbatches=4, memory_limit="1GB", offload="parameters")
    plan = fxshard.plan_pipeline(model, (tokens,), fxshard.Mesh({"pp": 2, "dp": 2}), microbatches=4)
    with pytest.raises(PlanError, match="the plan is for 4 microbatches on axis pp of mesh pp=2,dp=2, not 8"):
        fxshard.pipeline(model, (tokens,), device_mesh, microbatches=8, plan=plan)
    make = partial(fxshard.pipeline, model, (tokens,), device_mesh, microbatches=4)
    with pytest.raises(OptionError, match="a plan is given, so that memory_limit would be ignored"):
        make(plan=plan, memory_limit="1KB")
    with pytest.raises(PlanError, match="the plan is for the schedule 1F1B, not GPipe"):
        make(plan=plan, schedule="GPipe")
    with pytest.raises(PlanError, match=r"the plan has no layout for '.*', which passes between stages"):
        make(plan=replace(plan, layouts={}))
    other = replace(plan, stages=plan.stages[::-1]) if dist.get_rank() == 3 else plan
    with pytest.raises(RunError, match=r"the ranks differ in the plan of the pipeline: ranks 0-2: .*; rank 3: "):
        make(plan=other)


def by_name() -> None:
    """Keyword arguments go to the first stage by name, in any order, as torch's schedules pass them: to all stages of a rank."""
    _by_name(Schedule1F1B)
    _by_name(ScheduleInterleaved1F1B)


def _by_name(schedule: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    tokens, keep, targets = torch.randint(0, 11, (8, 5)), torch.rand(8, 5) > 0.3, torch.randint(0, 11, (8, 5))
    named = {"targets": targets[:2], "keep": keep[:2]}
    options = {"schedule": schedule.__name__.removeprefix("Schedule"), "compiler": "eager", "cache": False}
    stage = fxshard.pipeline(model, (tokens[:2],), device_mesh, microbatches=4, example_kwargs=named, **options)
    stages = stage.rank_stages
    runs = schedule(stage if len(stages) == 1 else list(stages), n_microbatches=4, loss_fn=lambda found, _: found[0])
    if stage.is_first:
        runs.step(tokens, keep=keep, targets=targets)
    else:
        runs.step(target=targets, return_outputs=False)
    torch.stack([reference(*(x[i : i + 2] for x in (tokens, keep, targets)))[0] for i in range(0, 8, 2)]).mean().backward()
    for name, parameter in (named for one in stages for named in one.submod.named_parameters()):
        want = reference.get_parameter(name).grad
        assert parameter.grad is not None and want is not None
        same(parameter.grad, want, name)


def a_stage_fails() -> None:
    """The other stage learns of it, instead of waiting for what this one would send."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    fails = dist.get_rank() >= 2
    broken = patch("fxshard.pipelines.stage.parallelize", side_effect=ValueError("too large")) if fails else nullcontext()
    said = "^too large" if fails else "rank [23] could not make its stage of the pipeline: ValueError: too large"
    with broken, pytest.raises(ValueError if fails else RunError, match=said):
        fxshard.pipeline(Logits(), (torch.randint(0, 11, (2, 5)),), device_mesh, microbatches=4, compiler="eager")


found, test_four_ranks = on_ranks(4, fully_sharded, interleaved, tensor_parallel, repeated, refused, a_stage_fails, by_name)
