"""The ways in which a session's model is sharded, each on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import fxshard
from tests.distributed.sessions.models import SUBJECTS
from tests.distributed.sessions.session import Door, play

STYLES: Mapping[str, Mapping[str, ParallelStyle]] = {
    "heads": {"trunk": ColwiseParallel(use_local_output=False), "head": RowwiseParallel()},
    "tied": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "shared": {"layer": ColwiseParallel(), "last": RowwiseParallel()},
    "pictures": {"head": ColwiseParallel(output_layouts=Replicate())},
    "recurrent": {"head": ColwiseParallel(output_layouts=Replicate())},
}


OPTIONS: Mapping[str, Any] = {"compiler": "eager", "timeout": 60.0}


def mesh(axis: str = "dp") -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))


def by_word(word: str, model: nn.Module, args: Any, kwargs: Any) -> Any:
    where = mesh()
    return fxshard.parallelize(model, args, where, example_kwargs=kwargs, parallel={"dp": word}, **OPTIONS), where


def by_fully_shard(model: nn.Module, args: Any, kwargs: Any) -> Any:
    where = mesh()
    fully_shard(model, mesh=where)
    return fxshard.parallelize(model, args, where, example_kwargs=kwargs, **OPTIONS), where


def by_styles(subject: str, model: nn.Module, args: Any, kwargs: Any) -> Any:
    return fxshard.parallelize_module(model, mesh("tp"), dict(STYLES[subject]), **OPTIONS), None


def by_backend(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return torch.compile(model, backend="fxshard", options={"mesh": mesh(), **OPTIONS}), None


def by_torch_styles(subject: str, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """torch's own ``parallelize_module``, then the backend."""
    styles.parallelize_module(model, mesh("tp"), dict(STYLES[subject]))
    return torch.compile(model, backend="fxshard", options=dict(OPTIONS)), None


def doors(subject: str) -> dict[str, Door]:
    words = {word: functools.partial(by_word, word) for word in ("auto", "ddp", "fsdp", "tp")}
    torchs = {"torch's styles": functools.partial(by_torch_styles, subject)} if subject in ("tied", "pictures") else {}
    return {**words, "fully_shard": by_fully_shard, "styles": functools.partial(by_styles, subject), "backend": by_backend, **torchs}


def session(door: str, subject: str, seed: int) -> None:
    done = play(doors(subject)[door], subject, seed)
    refused = [step for step in done if ":" in step]
    assert not refused, f"a step was refused: {refused[0]}"


EVERY = [(door, subject) for subject in SUBJECTS for door in doors(subject)]
