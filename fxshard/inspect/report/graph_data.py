"""The graph of a plan as data for the report: nodes, edges, modules, redistributions, pictures of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.inspect.report.pictures import cuts_of
from fxshard.inspect.report.tables import Table
from fxshard.layout.layouts import Layout, placement_str
from fxshard.layout.redistribution import sent_bytes, walk
from fxshard.plans.plan_data import AGAIN, PlanData, PlannedNode, Redistribution

Value = tuple[int, int]
"""(index of a node, index of its output)"""


class GraphData:
    """The tables of a plan's graph. ``nodes``: index by name."""

    def __init__(self, plan: PlanData) -> None:
        self.plan = plan
        self.nodes = {n.name: k for k, n in enumerate(plan.nodes)}
        self.ops: Table[str] = Table()
        self.modules: Table[str] = Table()
        self.lines: Table[str] = Table()
        self.shapes: Table[tuple[int, ...]] = Table()
        self.layouts: Table[Layout] = Table()
        self.dtypes: Table[str] = Table()
        self._pictures: dict[tuple[int, int], Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Everything as lists, with the tables to which their indexes refer."""
        backward, paths = backward_nodes(self.plan), module_of_nodes(self.plan)
        nodes = [self._node(node, node.name in backward, paths[node.name]) for node in self.plan.nodes]
        moves = [self._redistribution(entry) for entry in self.plan.redistributions]
        return {
            "nodes": nodes,
            "redistributions": moves,
            "parameters": [self.nodes[end.node] for end in self.plan.inputs if end.kind == "parameter" and end.node in self.nodes],
            "outputs": [[end.kind, end.name] for end in self.plan.outputs],
            "fallbacks": [[self.nodes.get(node, -1), reason] for node, reason in self.plan.fallbacks],
            "ops": self.ops.entries,
            "modules": self.modules.entries,
            "lines": self.lines.entries,
            "shapes": [list(shape) for shape in self.shapes.entries],
            "layouts": [[placement_str(p) for p in layout] for layout in self.layouts.entries],
            "dtypes": self.dtypes.entries,
            "pictures": [[*key, cuts] for key, cuts in self._pictures.items()],
            "edges": bool(self.plan.reads),
        }

    def value(self, text: str) -> Value:
        """The node and output of a redistributed value; (-1, 0) if the plan does not know it."""
        node, output = self.plan.picked.get(text, (text, 0))
        return self.nodes.get(node, -1), output

    def _operands(self, node: PlannedNode) -> list[Value]:
        made, count = self.plan.reads.get(node.name, ()), len(node.spec.inputs)
        if len(made) != count:
            return [(-1, 0)] * count
        return [(self.nodes.get(name, -1), k) for name, k in zip(made, self.plan.results.get(node.name, (0,) * count), strict=False)]

    def _node(self, node: PlannedNode, backward: bool, path: str) -> list[Any]:
        """[name, user's name, kind or "", operator, module, in the backward, outputs, operands, cost, line]."""
        line = self.plan.lines.get(node.name) or self.plan.lines.get(node.name.removesuffix(AGAIN), "")
        outputs = node.spec.outputs if len(node.spec.outputs) == len(node.shapes) else ()  # what is not a tensor has no shape
        return [
            node.name,
            self.plan.called(node.name),
            self.plan.kinds.get(node.name, ""),
            self.ops(node.op),
            self.modules(path),
            int(backward),
            [self._tensor(*one) for one in zip(node.shapes, outputs, node.dtypes, strict=False)],
            [[*value, self.layouts(layout)] for value, layout in zip(self._operands(node), node.spec.inputs, strict=True)],
            rounded(node.compute),
            self.lines(line),
        ]

    def _tensor(self, shape: tuple[int, ...], layout: Layout, dtype: str) -> list[int]:
        key = self.shapes(tuple(shape)), self.layouts(layout)
        if key not in self._pictures:
            cuts = cuts_of(shape, layout, self.plan.mesh.shape)
            self._pictures[key] = None if cuts is None else [[c.dim, list(c.axes), c.pieces] for c in cuts]
        return [*key, self.dtypes(dtype.removeprefix("torch."))]

    def _redistribution(self, entry: Redistribution) -> list[Any]:
        """[node, output, source, target, steps, cost, hidden, readers]; a step is [kind, axis, bytes, from, to]."""
        steps = [
            [
                step.kind,
                step.axis,
                sent_bytes(step, layout, entry.shape, entry.itemsize, self.plan.mesh) if step.is_collective else 0,
                placement_str(step.source),
                placement_str(step.target),
            ]
            for layout, step, _ in walk(entry.source, entry.steps)
        ]
        readers = [[self.nodes.get(node, -1), operand] for node, operand in entry.readers]
        ends = [self.layouts(entry.source), self.layouts(entry.target)]
        return [*self.value(entry.value), *ends, steps, rounded(entry.cost), rounded(entry.hidden), readers]


def rounded(number: float) -> float:
    """Six significant digits, which keep the data small."""
    return float(f"{number:.6g}")


def backward_nodes(plan: PlanData) -> set[str]:
    """The nodes that only gradients depend on; empty if the plan does not know its edges."""
    if not plan.train or not plan.reads:
        return set()
    last = plan.nodes[-1].name
    ends = plan.reads.get(last, ())
    kept = [value for value, end in zip(ends, plan.outputs, strict=False) if end.kind != "gradient"]
    todo, forward = list(kept), {last}
    while todo:
        node = todo.pop()
        if node not in forward:
            forward.add(node)
            todo += plan.reads.get(node, ())
    forward |= {name for name, kind in plan.kinds.items() if kind != "tangent"}
    return {n.name for n in plan.nodes} - forward


def module_of_nodes(plan: PlanData) -> Mapping[str, str]:
    """The module of every node: for a parameter or buffer the one that owns it; for a call that belongs to none, such as the sum of two
    gradients, the module of its operands if they are in the same one, else the parent of that of its last operand; empty at the top."""
    found: dict[str, str] = {}
    for node in plan.nodes:
        if node.name in plan.kinds:
            owned = plan.kinds[node.name] in ("parameter", "buffer")
            found[node.name] = plan.called(node.name).rpartition(".")[0] if owned else ""
            continue
        place = plan.places.get(node.name) or plan.places.get(node.name.removesuffix(AGAIN))
        path = None if place is None else place.module
        if path is None and node.op != "output":
            read = [name for name in plan.reads.get(node.name, ()) if name not in plan.kinds]
            paths = [found[name] for name in read if found.get(name)]
            path = "" if not paths else paths[-1] if len(set(paths)) == 1 and len(paths) == len(read) else paths[-1].rpartition(".")[0]
        found[node.name] = path or ""
    return found
