"""Keeps numbers that a model reads from tensors and computes with (``x / count.item()``) as 0-dim tensors, which ranks can run.

Covers sums, differences, products and quotients of numbers, and of a tensor with a number; a number used otherwise, such as a size, is
left as it is. Two results differ from Python: division by zero gives infinity, not ZeroDivisionError, and sums of integers and their
products with a literal wrap around at 2^63 (a product of two integers read from tensors stays a number).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard.graph.planning_graph import is_tensor

aten = torch.ops.aten
OF_NUMBERS = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
}
OF_TENSORS = tuple(OF_NUMBERS.values())
DTYPES = {torch.SymBool: torch.bool, torch.SymInt: torch.int64, torch.SymFloat: torch.float64}
"""The dtypes that correspond to Python's numbers."""


def keep_numbers_in_tensors(joint: fx.GraphModule) -> None:
    """Rewrites the users of such numbers, and removes the numbers that are no longer used."""
    if not any(joint.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)):
        return
    numbers = _Numbers(joint.graph)
    for node in list(joint.graph.nodes):
        with joint.graph.inserting_before(node):
            numbers.read(node)
    joint.graph.eliminate_dead_code()


@dataclass
class _Numbers:
    """``known``: a number's node -> its tensor."""

    graph: fx.Graph
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def read(self, node: fx.Node) -> None:
        dtype = DTYPES.get(type(node.meta.get("val")))
        if node.target is aten._local_scalar_dense.default and dtype is not None:
            self.known[node] = self._cast(self._call(node, aten.reshape.default, node.args[0], []), dtype)
        elif node.target is torch.sym_float and self._is_known(node.args[0]):
            self.known[node] = self._cast(self.known[node.args[0]], torch.float64)
        elif node.target in OF_NUMBERS and dtype is not None and self._all_known(node.args) and not _may_wrap(node, dtype):
            operands = [self._operand(node, a, dtype) for a in node.args]
            self.known[node] = self._call(node, OF_NUMBERS[node.target], *operands)
        elif node.target is aten.scalar_tensor.default and self._is_known(node.args[0]):
            node.replace_all_uses_with(self._cast(self.known[node.args[0]], node.meta["val"].dtype))
        elif node.target in OF_TENSORS and len(node.args) == 2 and self._is_known(node.args[1]) and not node.kwargs:
            self._replace(node)

    def _is_known(self, value: Any) -> bool:
        """Whether it is a number with a tensor; symbolic sizes are not nodes, and not hashable."""
        return isinstance(value, fx.Node) and value in self.known

    def _all_known(self, args: Any) -> bool:
        return any(map(self._is_known, args)) and all(self._is_known(a) or isinstance(a, int | float) for a in args)

    def _replace(self, node: fx.Node) -> None:
        """Replaces the number by its tensor, unless type promotion with the 0-dim tensor would change the result's dtype."""
        if not is_tensor(node.args[0]):
            return
        call = self._call(node, node.target, node.args[0], self.known[node.args[1]])
        if call.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(call)

    def _operand(self, node: fx.Node, value: Any, dtype: torch.dtype) -> fx.Node:
        if self._is_known(value):
            return self._cast(self.known[value], dtype)
        return self._call(node, aten.full.default, [], value, dtype=dtype)

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self._call(x, aten._to_copy.default, x, dtype=dtype)

    def _call(self, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        call = self.graph.call_function(target, args, kwargs)
        given = fx.map_arg(args, lambda n: n.meta["val"])
        mode = next(n.meta["val"] for n in (origin, *self.known.values(), *origin.all_input_nodes) if is_tensor(n)).fake_mode
        with mode:
            value = target(*given, **kwargs)
        call.meta = {**{k: v for k, v in origin.meta.items() if k != "unbacked_bindings"}, "val": value}
        return call


def _may_wrap(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether it is a product of two integers read from tensors: as a tensor, it could wrap around at 2^63."""
    return node.target is operator.mul and dtype == torch.int64 and all(isinstance(a, fx.Node) for a in node.args)
