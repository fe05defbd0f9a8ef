"""What each submodule reads from outside: its inputs, for pins by the name ``layers.0.mlp.inputs``.

A value is read in another layout than it has by redistributing it, so a pin on an input of a module is a condition on the nodes of the
module that read it in the forward, not on the value: other readers, a residual connection for example, are not concerned.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxshard.graph.planning_graph import PlanningGraph, is_tensor, operands, producer
from fxshard.passes.trace.returned import user_path

Readers = tuple[tuple[str, int], ...]
"""(node, operand index) of each node of a module that reads a value from outside."""


def module_inputs(graph: PlanningGraph) -> Mapping[str, Mapping[str, Readers]]:
    """Module -> value -> its readers in the module, both in the order of the graph. Parameters and buffers do not count."""
    own = {end.node for end in graph.inputs if end.kind != "input"}
    found: dict[str, dict[str, Readers]] = {}
    for node in graph.module.graph.nodes:
        for module in modules_of(node):
            for k, operand in enumerate(operands(node)):
                if operand.name not in own and is_tensor(operand) and module not in modules_of(producer(operand)[0]):
                    values = found.setdefault(module, {})
                    values[operand.name] = (*values.get(operand.name, ()), (node.name, k))
    return found


def modules_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the submodules in whose forward a node is, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {} if node.op == "call_function" else {}
    names = (user_path(path) for path, _ in stack.values())
    return tuple(name for name in names if name)
