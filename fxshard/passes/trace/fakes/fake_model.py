"""CPU fakes of a model and of a call of it, with the shapes of the originals, to trace or to run as Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import own_tensors
from fxshard._torch_compat.dynamo.hooks import without_hooks
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import FxshardError, TraceError
from fxshard.graph.objects import on_cpu
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, cast_input, cast_parameters
from fxshard.passes.trace.fakes.rebind import rebind
from fxshard.passes.trace.fakes.symbols import Symbols
from fxshard.passes.trace.fakes.tensor_kinds import check_dense
from fxshard.passes.trace.rewrites.constants import plain_tensors
from fxshard.shapes import DynamicDim
from fxshard.shapes.arguments import path_name


@dataclass(frozen=True)
class Twin:
    """A fake copy of a model, without its hooks, and the leaves and structure of a call of it."""

    model: nn.Module
    leaves: list[Any]
    spec: pytree.TreeSpec
    mode: FakeTensorMode
    symbols: Symbols


@dataclass(frozen=True)
class Call:
    """A model, the (args, kwargs) of a call of it, and the options of the trace."""

    model: nn.Module
    arguments: tuple[Any, Any]
    train: bool
    precision: MixedPrecision | None
    dims: Sequence[DynamicDim]
    cache: bool = False

    def twin(self) -> Twin:
        symbols = Symbols(self.dims)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.env.shape_env)
        model = without_hooks(fake_copy(self.model, mode, self.train))
        paths, spec = pytree.tree_flatten_with_path(self.arguments)
        leaves = [symbols.fake(path_name(path), fake_tensor(a, mode, self.train)) for path, a in paths]
        if self.precision is not None:
            cast_parameters(model, self.precision)
            leaves = [cast_input(a, self.precision) for a in leaves]
        return Twin(model, leaves, on_cpu(spec), mode, symbols)


def fake_copy(model: nn.Module, mode: FakeTensorMode, train: bool = True) -> nn.Module:
    """A copy of ``model`` whose tensors are CPU fakes; ties are kept. Raises TraceError if the model cannot be copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.parameters(recurse=False):  # under functional_call they may not be nn.Parameters
            if id(value) not in memo:
                memo[id(value)] = nn.Parameter(_fake_of(value, mode), value.requires_grad and train)
        for value in (*own_tensors(module), *plain_tensors(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake_tensor(value, mode, train)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch about its own structures, in modules from torch.export
            copied = copy.deepcopy(model, memo)
        rebind(copied, memo)
        return copied
    except FxshardError:
        raise
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied: {error}", where=type(model).__name__, remedy="remove attributes that copy.deepcopy refuses"
        ) from error


def fake_tensor(value: Any, mode: FakeTensorMode, train: bool = True) -> Any:
    """A CPU fake with the shape, strides, dtype and ``requires_grad`` of a tensor; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    fake = _fake_of(value, mode)
    with mode:
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, requires_grad=value.requires_grad and train)
        return fake.requires_grad_(value.requires_grad and train)


def _fake_of(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    check_dense(value)
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
