"""The ``LocalContext`` of a node that is being lowered."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxshard.graph.call import Call
from fxshard.graph.planning_graph import is_tensor
from fxshard.layout.layouts import Layout, is_emptied
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.shaping import wait
from fxshard.plans.plan_data import OpSpec
from fxshard.program.sharded_program import SHIFT, ZIGZAG


class Context:
    """The LocalContext of one node in one size class."""

    def __init__(self, node: fx.Node, call: Call, spec: OpSpec, local: LocalGraph) -> None:
        self.call, self.inputs, self.outputs, self.target = call, spec.inputs, spec.outputs, node.target
        self.local = local
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.mesh = local.mesh
        self.issued: list[fx.Node] = []
        """The collectives that the local form has issued."""
        self.single = is_tensor(node)

    def input_shape(self, operand: int) -> tuple[int, ...]:
        return self.local.local_shape(self.call.operands[operand].shape, self.inputs[operand])

    def output_shape(self, output: int = 0) -> tuple[int, ...]:
        meta = self.call.outputs[output]
        assert meta is not None
        return self.local.local_shape(meta.shape, self.outputs[output])

    def input_offset(self, operand: int, dim: int) -> fx.Node | int:
        return self.local.offset(self.call.operands[operand].shape[dim], self.inputs[operand].axes_on(dim))

    def output_offset(self, output: int, dim: int) -> fx.Node | int:
        meta = self.call.outputs[output]
        assert meta is not None
        return self.local.offset(meta.shape[dim], self.outputs[output].axes_on(dim))

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.local.emit(target, *args, **kwargs)

    def axis_index(self, axis: int) -> fx.Node:
        return self.local.axis_index(axis)

    def shift(self, x: fx.Node, axis: int) -> fx.Node:
        return self.collective(SHIFT, x, axis=axis)

    def zigzag(self, x: fx.Node, back: bool, axis: int) -> fx.Node:
        return self.collective(ZIGZAG, x, back, axis=axis)

    def collective(self, target: Any, *args: Any, axis: int) -> fx.Node:
        self.issued.append(self.emit(target, *args, self.mesh.axis_names[axis]))
        return self.issued[-1]

    def arrived(self, started: fx.Node) -> fx.Node:
        result = wait(self.local, started)
        self.local.next_part()
        return result

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.local.item(node, index)

    def part_lengths(self, layout: Layout, dim: int) -> tuple[int, ...]:
        return self.local.part_lengths(layout, dim)

    @property
    def is_empty(self) -> bool:
        """Whether sharding leaves this rank no elements of some operand, or of all results. Of operands that become the parts of a packed
        dim, some may be empty."""
        metas = [(i, m) for i, m in enumerate(self.call.outputs) if m is not None]
        if metas and all(is_emptied(self.output_shape(i), m.shape) for i, m in metas):
            return True
        if any(layout.axes_on(p.dim) for out in self.outputs for p in out.packed for layout in self.inputs):
            return False
        return any(is_emptied(self.input_shape(i), m.shape) for i, m in enumerate(self.call.operands))
