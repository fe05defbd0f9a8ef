"""The local form of an operator: what each rank runs on its shards.

Most operators run unchanged. A few have a size among their arguments (``size_argument=``), and very few need the position of the
shard in the global tensor (``local=`` functions, which get a ``LocalContext``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fxshard.graph.call import Call
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh

aten = torch.ops.aten


class LocalContext(Protocol):
    """What a ``local=`` function may use while its node is lowered for one size class."""

    call: Call
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    args: tuple[Any, ...]
    """Arguments, with operands as local nodes."""
    kwargs: dict[str, Any]
    target: Any
    mesh: Mesh

    def input_shape(self, operand: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        ...

    def output_shape(self, output: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        ...

    def input_offset(self, operand: int, dim: int) -> fx.Node | int:
        """Global index of the operand shard's first element along ``dim``: a run-time int64 scalar tensor, or 0."""
        ...

    def output_offset(self, output: int, dim: int) -> fx.Node | int:
        """The same for an output."""
        ...

    def part_lengths(self, layout: Layout, dim: int) -> tuple[int, ...]:
        """Local lengths of the parts of a packed dim; () if ``layout`` does not pack it."""
        ...

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call of an aten (or neutral) operator to the local graph."""
        ...

    def axis_index(self, axis: int) -> fx.Node:
        """The rank's index on a mesh axis: a run-time int64 scalar tensor."""
        ...

    def shift(self, x: fx.Node, axis: int) -> fx.Node:
        """Starts to send ``x``, of equal shape on all ranks, to the next rank of a mesh axis; ``arrived`` gives what the previous one sent.

        An operator that does so must declare it (``register(collectives=...)``), and do it on every rank, those with empty shards included.
        """
        ...

    def zigzag(self, x: fx.Node, back: bool, axis: int) -> fx.Node:
        """The same for halves of ``x`` [2, ...], which go to the ranks that ``fxshard::zigzag`` says."""
        ...

    def collective(self, target: Any, *args: Any, axis: int) -> fx.Node:
        """The same for any collective ``target(*args, group name)``."""
        ...

    def arrived(self, started: fx.Node) -> fx.Node:
        """What a collective receives."""
        ...

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Result ``index`` of a call with several results."""
        ...


LocalForm = Callable[[LocalContext], Any]
"""Emits the local operator; returns its node, or a tuple of nodes for an operator with several outputs.

It must depend only on the context and on the operands' shapes, strides and dtypes, because equal calls share one local form.
"""


def emit_padding(emit: Callable[..., fx.Node], x: fx.Node, amounts: Sequence[int], value: float) -> fx.Node:
    """Emits ``constant_pad_nd``. Bools are padded as bytes: Inductor (2.13) writes C++ that does not compile for the padding of bools that
    were computed from bytes and indexed."""
    if x.meta["val"].dtype != torch.bool:
        return emit(aten.constant_pad_nd.default, x, list(amounts), value)
    as_bytes = emit(aten._to_copy.default, x, dtype=torch.uint8)
    return emit(aten._to_copy.default, emit(aten.constant_pad_nd.default, as_bytes, list(amounts), int(value)), dtype=torch.bool)


def on_contiguous(form: LocalForm, accepts: Callable[[torch.Tensor], bool] | None = None) -> LocalForm:
    """``form`` on contiguous copies of the operands that it does not ``accept``.

    For kernels that require contiguous operands, or misread others: a shard's strides may differ from those of the whole tensor. Whether
    memory is channels-last is known only at run time (convolutions choose), so by default all but contiguous vectors are copied; a compiler
    drops needless copies.
    """

    def local(ctx: LocalContext) -> Any:
        ctx.args = tuple(_contiguous(ctx, a, accepts or _is_vector) for a in ctx.args)
        return form(ctx)

    return local


def _is_vector(t: torch.Tensor) -> bool:
    return t.ndim < 2 and t.is_contiguous()


def _contiguous(ctx: LocalContext, value: Any, accepts: Callable[[torch.Tensor], bool]) -> Any:
    tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    if not isinstance(tensor, torch.Tensor) or accepts(tensor):
        return value
    return ctx.emit(aten.clone.default, value, memory_format=torch.contiguous_format)
