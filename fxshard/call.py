"""What a rule sees of a node: the operator, its plain arguments, and the shapes of its tensors. Hashable, so rules are asked once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard.planning_graph import operands, outputs_of, plain_shape


@dataclass(frozen=True)
class TensorMeta:
    """Global shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Operand:
    """Stands in ``Call.args`` for the ``index``-th tensor operand."""

    index: int


@dataclass(frozen=True)
class Call:
    """One call of an operator on global tensors.

    ``op``: ``"aten.mm.default"``; ``args``/``kwargs``: as in the graph, tensors replaced by ``Operand(i)``, lists by
    tuples; ``operands``: the tensor operands in order of occurrence; ``outputs``: None where an output is no tensor.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta | None, ...]

    def arg(self, position: int, name: str | None = None, default: Any = None) -> Any:
        """Argument by position, or by keyword ``name``, or ``default``."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default) if name else default

    def meta(self, position: int) -> TensorMeta | None:
        """Meta of the tensor at argument ``position``, None where there is none."""
        value = self.arg(position)
        return self.operands[value.index] if isinstance(value, Operand) else None

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.kwargs, self.operands, self.outputs))

    def __hash__(self) -> int:
        return self._hash


def call_of(node: fx.Node) -> Call:
    """The ``Call`` behind a graph node."""
    count = iter(range(len(operands(node))))
    args, kwargs = pytree.tree_map(
        lambda a: Operand(next(count)) if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor) else a,
        (tuple(node.args), dict(node.kwargs)),
    )
    metas = tuple(TensorMeta(plain_shape(o.meta["val"].shape), o.meta["val"].dtype) for o in operands(node))
    outs = tuple(None if v is None else TensorMeta(plain_shape(v.shape), v.dtype) for v in outputs_of(node))
    return Call(str(node.target), _freeze(args), tuple(sorted((k, _freeze(v)) for k, v in kwargs.items())), metas, outs)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value
