"""Operators that can only be replicated, with the reason: their positions depend on data or on the memory of the whole tensor."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, Rule, linear_groups, replicate_all
from fxshard.strategies.engine.local import LocalContext, LocalForm, on_contiguous
from fxshard.strategies.engine.registry import register, replaced, unchanged
from fxshard.strategies.tensors.pointwise import aten_names

REASONS = {
    "nonzero nonzero_static masked_select _unique2 unique_dim unique_consecutive bincount repeat_interleave.Tensor": (
        "what it returns depends on the values of the whole tensor"
    ),
    "masked_scatter_backward": "elements are taken in the order of the whole mask",
    "put index_reduce": "positions that are written more than once depend on the order of the whole tensor",
    "resize resize_": "a larger size adds uninitialised memory",
    "_local_scalar_dense": "a number is the same on all ranks",
    "bucketize.Scalar searchsorted.Scalar": "a number is looked up in the whole sorted tensor",
    "trace block_diag": "its diagonal runs through both dims",
    "_ctc_loss _ctc_loss_backward": "its list of lengths is that of the whole batch",
    "_linalg_check_errors": "a check has no output",
}
STRIDED = "strides and offsets in memory are those of the whole tensor"
MASKED = "elements are taken in the order of the whole mask"


def local_contiguous(ctx: LocalContext) -> Any:
    """Runs on a contiguous copy, since redistribution may have changed the strides."""
    copy = ctx.emit(torch.ops.aten.clone.default, ctx.args[0], memory_format=torch.contiguous_format)
    return ctx.emit(ctx.target, *replaced(ctx.args, {0: copy}), **ctx.kwargs)


def moves_elements(reason: str, *groups: tuple[int, ...]) -> Rule:
    """Replicated, but all pending reductions pass through ``groups`` of arguments, whose elements only move."""

    def rule(call: Call) -> Factors:
        return replace(replicate_all(call, reason), linear=linear_groups(call, groups, MOVEMENT))

    return rule


def _register(ops: str, reason: str, local: LocalForm = unchanged) -> None:
    register(aten_names(ops), functools.partial(replicate_all, note=reason), local=local)


for _ops, _reason in REASONS.items():
    _register(_ops, _reason, on_contiguous(unchanged))
register(aten_names("masked_scatter"), moves_elements(MASKED, (0, 2)))
register(aten_names("as_strided as_strided_copy"), moves_elements(STRIDED, (0,)), local=local_contiguous)
_register("as_strided_scatter", STRIDED, local_contiguous)
