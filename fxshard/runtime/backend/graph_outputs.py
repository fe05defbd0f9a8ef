"""Classifies the outputs of a Dynamo graph: computed values, inputs returned unchanged, views of either, and Python values.

The classification runs on fake tensors. Each call recreates a view of an input, or of another output, from its base tensor, so that the
two share memory as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.dtensor.views import base_of, is_one_of_several, viewed_again, views_are_recorded
from fxshard._torch_compat.fakes import FakeTensorMode, storage_key
from fxshard.errors import RunError, TraceError
from fxshard.layout.layouts import Layout
from fxshard.passes.trace.fakes.fake_model import fake_tensor
from fxshard.passes.trace.rewrites.probe import probe


@dataclass(frozen=True)
class View:
    """A view of a tensor: the tensor itself if ``strides`` is None, else ``shape`` and ``strides``, from ``offset`` elements on.

    ``base``: the strides that the viewed tensor must have. ``detached``: whether no gradient flows through the view.
    """

    detached: bool = False
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    offset: int = 0
    base: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor``; raises RunError for other strides than ``base``."""
        tensor = tensor.detach() if self.detached else tensor
        if self.strides is None:
            return tensor
        if tensor.stride() != self.base:
            what = f"an output is a view of a tensor with strides {self.base}, which has strides {tensor.stride()} in this call"
            raise RunError(what, remedy="return a clone of the view, or pass tensors of the same strides")
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


IDENTITY = View()


@dataclass(frozen=True, eq=False)
class DTensorView:
    """A view of a DTensor by the operators that made ``made``, a fake view of a fake like it. DTensor runs them as in eager execution: a
    view along a sharded dim may be a copy there too."""

    made: torch.Tensor
    detached: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor``."""
        return viewed_again(self.made, tensor.detach() if self.detached else tensor)


@dataclass(frozen=True)
class Output:
    """One output of a graph: computed, or the ``view`` of input ``of_input`` or of output ``of_output``, or the Python value ``value``.
    ``row``: whether the caller gets the computed value, one row, without its first dim; ``terms``: the layout of the DTensor of which that
    row is this rank's term."""

    computed: bool = False
    of_input: int | None = None
    of_output: int | None = None
    view: View | DTensorView = IDENTITY
    value: Any = None
    row: bool = False
    terms: Layout | None = None


def output_kind(output: Output) -> tuple[Any, ...]:
    """The part of an output that must be equal in all calls of one program, whatever their sizes."""
    view = output.view
    return output.computed, output.of_input, output.of_output, view.detached, type(view), isinstance(view, View) and view.strides is None


def find_outputs(module: fx.GraphModule, tensors: Sequence[torch.Tensor], distributed: Sequence[bool], views: bool) -> tuple[Output, ...]:
    """The outputs of ``module`` for inputs like ``tensors``.

    ``distributed``: for each output, whether it is a DTensor. ``views``: whether to detect views; if False, they count as computed. Raises
    TraceError for a number that depends on data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    probes = [fake_tensor(t, mode, train=False) for t in tensors]
    with views_are_recorded():
        values = probe(module, probes)
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not value.node.is_constant():
            raise TraceError(
                "the graph returns a Python number that is known only at run time",
                remedy="return a tensor, or leave Dynamo's option capture_scalar_outputs off: then .item() breaks the graph",
            )
    shared = len({*map(storage_key, probes), *(k := _storages(values))}) < len(probes) + len(k)
    needed = [t.requires_grad and torch.is_grad_enabled() for t in tensors]
    graded = _values_with_gradient(module, tensors, needed) if shared else values
    grads = [isinstance(v, torch.Tensor) and v.requires_grad for v in graded]
    several = [isinstance(v, torch.Tensor) and is_one_of_several(v) for v in graded]
    found = _StorageMap(probes, values, grads, several, needed, distributed, views, [isinstance(t, DTensor) for t in tensors])
    return tuple(found.output(i) for i in range(len(values)))


def _storages(values: Sequence[Any]) -> list[int]:
    return [storage_key(v) for v in values if isinstance(v, torch.Tensor)]


class _StorageMap:
    """Inputs and outputs by their storage."""

    def __init__(
        self,
        probes: Sequence[Any],
        values: Sequence[Any],
        grads: Sequence[bool],
        several: Sequence[bool],
        needed: Sequence[bool],
        distributed: Sequence[bool],
        views: bool,
        sharded: Sequence[bool],
    ) -> None:
        self.probes, self.values, self.grads, self.needed = probes, values, grads, needed
        self.distributed, self.views, self.sharded, self.several = distributed, views, sharded, several
        self.inputs = {storage_key(t): i for i, t in enumerate(probes)}
        self.bases: dict[tuple[int, bool], int] = {}
        whole = [i for i, value in enumerate(values) if _fills_storage(value)]
        for i in sorted(whole, key=lambda i: not grads[i]):  # a base without a gradient cannot have a view with one
            self.bases.setdefault((storage_key(values[i]), distributed[i]), i)

    def output(self, i: int) -> Output:
        value = self.values[i]
        if not isinstance(value, torch.Tensor):
            return Output(value=value)
        place, base = self.inputs.get(storage_key(value)), self.bases.get((storage_key(value), self.distributed[i]))
        if place is not None:
            view = IDENTITY if value is self.probes[place] else self._view_of_input(i, place)
            return Output(computed=True) if view is None else Output(of_input=place, view=view)
        if base is None or base == i or not self.views or self.grads[i] > self.grads[base]:
            return Output(computed=True)
        make = self._dtensor_view if self.distributed[i] else self._view
        view = make(i, self.values[base], self.grads[base])
        return Output(computed=True) if view is None else Output(of_output=base, view=view)

    def _view_of_input(self, i: int, place: int) -> View | DTensorView | None:
        base, graded = self.probes[place], self.needed[place]
        if self.views and self.sharded[place] and self.distributed[i]:
            return self._dtensor_view(i, base, graded)
        return self._view(i, base, graded, self.views and not self.sharded[place] and not self.distributed[i])

    def _dtensor_view(self, i: int, base: Any, graded: bool) -> DTensorView | None:
        """The view of ``base``, a DTensor, that output ``i`` is; None if it must be computed: other operators lie between, or one of
        several results, whose backward mixes DTensors with plain zeros if a result is not used."""
        value = self.values[i]
        viewed = value.dtype == base.dtype and base_of(value) is base and not (graded and self.several[i])
        return DTensorView(value, graded and not self.grads[i]) if viewed else None

    def _view(self, i: int, base: Any, graded: bool, strided: bool = True) -> View | None:
        """The view of ``base`` that output ``i`` is; None if it must be computed: another dtype, or data-dependent sizes."""
        value, detached = self.values[i], graded and not self.grads[i]
        if not _is_plain(value) or not _is_plain(base) or value.dtype != base.dtype or value.is_conj() != base.is_conj():
            return None
        if not strided:
            alike = (value.shape, value.stride(), value.storage_offset()) == (base.shape, base.stride(), base.storage_offset())
            return View(detached) if alike else None
        offset = value.storage_offset() - base.storage_offset()
        return View(detached, tuple(value.shape), tuple(value.stride()), offset, tuple(base.stride()))


def _is_plain(value: Any) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _fills_storage(value: Any) -> bool:
    """Whether a tensor is contiguous and fills its storage."""
    if not isinstance(value, torch.Tensor) or value.is_sparse or not _is_plain(value) or not value.numel():
        return False
    return value.is_contiguous() and value.numel() * value.element_size() == value.untyped_storage().nbytes()


def _values_with_gradient(module: fx.GraphModule, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[Any]:
    """The outputs of a run on fakes, of which those that are ``needed`` require gradients."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    probes = [_non_leaf_fake(t, mode) if one else fake_tensor(t, mode, train=False) for t, one in zip(tensors, needed, strict=True)]
    return probe(module, probes, grad=any(needed))


def _non_leaf_fake(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake that requires a gradient and is not a leaf of autograd, so that the graph may mutate it."""
    with mode, torch.enable_grad():
        size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        flat = torch.empty(size, dtype=value.dtype, requires_grad=True) * 1
        return flat.as_strided(value.shape, value.stride())
