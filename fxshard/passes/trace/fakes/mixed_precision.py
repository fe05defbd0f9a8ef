"""Mixed precision: parameters keep their dtype and are cast where the model reads them; gradients are cast before they are reduced.

The casts are nodes of the graph. Planner and lowering need only the values in which a gradient must not be reduced
(``PlanningGraph.unreduced``). Gathers move the cast parameter because that is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import fx, nn
from torch.distributed.tensor import Partial

from fxshard.errors import OptionError, a_kind
from fxshard.graph.planning_graph import PlanningGraph, operands
from fxshard.layout.layouts import Layout

aten = torch.ops.aten
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a model computes; its parameters (the optimiser's master weights) and their gradients keep their own.

    ``param_dtype``: floating-point parameters are cast to it where they are read. ``reduce_dtype``: the dtype in which gradients are
    reduced over ranks, ``param_dtype`` if None. ``cast_inputs``: floating-point arguments are cast too. Buffers keep their dtype. Raises
    OptionError for a dtype that is not a floating-point type of at least 16 bits. ``gathers="fp8"``: weights of two dims and more are cast
    to float8_e4m3fn where they are read, and from there to ``param_dtype``, so that a gather in between moves a byte per element. Such
    plans can be made and compared, but not run (``check_runs``).
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    gathers: Literal["fp8"] | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if name == "reduce_dtype" and value is None:
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
                said = value if isinstance(value, torch.dtype) else a_kind(value)
                raise OptionError(f"{name} is {said}", where="mixed_precision", remedy="give torch.bfloat16, float16, float32 or float64")

        if self.gathers not in (None, "fp8"):
            raise OptionError(f"gathers is {self.gathers!r:.40}", where="mixed_precision", remedy='give "fp8", or leave it out')

    @property
    def reduces_in(self) -> torch.dtype:
        return self.reduce_dtype or self.param_dtype


def check_mixed_precision(value: Any) -> MixedPrecision | None:
    """Raises OptionError unless ``value`` is a MixedPrecision or None."""
    if value is not None and not isinstance(value, MixedPrecision):
        raise OptionError(f"mixed_precision is {a_kind(value)}", remedy="give fxshard.MixedPrecision(param_dtype=torch.bfloat16)")
    return value


def check_runs(precision: MixedPrecision | None) -> None:
    """Raises OptionError for what has only been planned so far."""
    if precision is not None and precision.gathers == "fp8":
        what = "fp8 gathers have not been run on a GPU yet: fxshard can only plan them"
        remedy = 'leave gathers="fp8" out of MixedPrecision to run; fxshard.plan and fxshard.diff show what it would save'
        raise OptionError(what, where="mixed_precision", remedy=remedy)


class _Read(torch.autograd.Function):
    """Casts a parameter to ``param_dtype``, and its gradient first to ``reduce_dtype``, then to the parameter's own dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, precision: MixedPrecision) -> torch.Tensor:
        ctx.dtypes = precision.reduces_in, x.dtype
        if precision.gathers == "fp8" and x.dim() >= 2 and x.is_floating_point():
            x = x.to(FP8)
        return x.view_as(x) if x.dtype == precision.param_dtype else x.to(precision.param_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        reduced, master = ctx.dtypes
        return grad.to(reduced).to(master), None


def read_in(x: torch.Tensor, precision: MixedPrecision) -> torch.Tensor:
    """``x`` [any shape] cast to ``param_dtype``, differentiably."""
    return _Read.apply(x, precision)


Masters = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By id of the captured low-precision parameter: (that parameter, held so that its id is not reused; the master parameter)."""


def cast_parameters(fake_model: nn.Module, precision: MixedPrecision) -> Masters:
    """Replaces floating-point parameters by copies in ``param_dtype``, so that the model sees that dtype while it is captured."""
    made: dict[int, nn.Parameter] = {}
    masters: Masters = {}
    for module in fake_model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            other = precision.gathers is not None or parameter.dtype != precision.reduces_in
            if _casts(parameter, precision) or (parameter.is_floating_point() and other):
                if id(parameter) not in made:
                    low = nn.Parameter(parameter.detach().to(precision.param_dtype, copy=True), parameter.requires_grad)
                    made[id(parameter)], masters[id(low)] = low, (low, parameter)
                setattr(module, key, made[id(parameter)])
    return masters


def cast_input(value: Any, precision: MixedPrecision) -> Any:
    """A fake argument in the dtype that the model sees while it is captured."""
    if not precision.cast_inputs or not isinstance(value, torch.Tensor) or not _casts(value, precision):
        return value
    return value.detach().to(precision.param_dtype).requires_grad_(value.requires_grad)


def _casts(value: torch.Tensor, precision: MixedPrecision) -> bool:
    return value.is_floating_point() and value.dtype != precision.param_dtype


def insert_casts(
    captured: fx.GraphModule, masters: Masters, lowered: Sequence[Any], given: Sequence[Any], precision: MixedPrecision
) -> None:
    """Restores the original parameters and arguments, with a cast before their users. ``lowered``: the captured arguments, ``given``: the
    original ones."""
    graph, casts = captured.graph, {}
    ends = [n for n in graph.nodes if n.op == "placeholder"]
    for node, seen, value in zip(ends, lowered, given, strict=True):
        if seen is not value:
            _cast_after(graph, node, ends[-1], replace(precision, gathers=None))
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        owner, _, key = str(node.target).rpartition(".")
        module = captured.get_submodule(owner)
        value = getattr(module, key)
        if id(value) in masters:
            setattr(module, key, masters[id(value)][1])
            casts[node.target] = id(value)
    first: dict[int, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr" and n.target in casts]:
        which = casts[node.target]
        if which in first:
            node.replace_all_uses_with(first[which])
        else:
            first[which] = _cast_after(graph, node, node, precision)
    captured.recompile()


def _cast_after(graph: fx.Graph, node: fx.Node, after: fx.Node, precision: MixedPrecision) -> fx.Node:
    with graph.inserting_after(after):
        cast = graph.call_function(read_in, (node, precision))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def unreduced(graph: PlanningGraph, precision: MixedPrecision) -> frozenset[str]:
    """The names of values on the way to a parameter's gradient whose dtype is not the one in which the gradient is to be reduced."""
    parameters = {i.name for i in graph.inputs_of("parameter")}
    found: set[fx.Node] = set()
    for end, value in zip(graph.outputs, operands(graph.module.graph.output_node()), strict=True):
        if end.kind == "gradient" and end.name in parameters:
            forms = [value]
            for dtype in (precision.reduces_in, precision.param_dtype):
                before = forms[-1].args[0] if forms[-1].target is aten._to_copy.default else None
                if _dtype(forms[-1]) != dtype and isinstance(before, fx.Node) and _dtype(before) == dtype:
                    forms.append(before)
            if len(forms) > 1:
                found |= {*forms, *_parts(forms[-1])}
    return frozenset(n.name for n in found if _dtype(n) != precision.reduces_in)


PARTS = frozenset({aten.add.Tensor, aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default})
"""Operators through which ``_parts`` follows a gradient: sums and views."""


def _parts(value: fx.Node) -> set[fx.Node]:
    """The operands of the sums and views that ``value`` is made by, if nothing else reads them: a pending sum could be reduced there."""
    read = operands(value) if value.target in PARTS | {aten._to_copy.default} else ()
    alone = {n for n in read if len(n.users) == 1 and n.op == "call_function"}
    return alone.union(*map(_parts, alone))


def _dtype(value: fx.Node) -> torch.dtype:
    dtype: torch.dtype = value.meta["val"].dtype
    return dtype


def reduces_pending(layouts: Sequence[Layout]) -> np.ndarray:
    """[from, to] whether redistribution between these layouts reduces a pending sum on some axis."""
    pending = np.array([[isinstance(p, Partial) for p in layout] for layout in layouts])
    return (pending[:, None] & ~pending[None]).any(-1)
