"""Layers that are alike, in a captured graph: the first, second and last two of a row are written out, those between are left out.

What is left out is put back by ``unroll`` when the rest has become forward and backward.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.dynamo.repeats import Repeats, Traced, has_hooks, order_tensors, repeat

RETURNED = torch.ops.fxshard.returned.default
KEPT = 4
"""Copies of a row that are traced: the two at its ends may differ from those between in what is around them."""
LABEL = "fxshard_alike"
"""Where a node's meta["custom"], which goes through the trace, has its row and its copy among those that are kept, from 0 on."""
Label = tuple[int, int] | None


class NotAlike(Exception):
    """What was taken for a row of alike layers is none; the model is traced whole then."""


@dataclass(frozen=True)
class Row:
    """Calls of alike modules one behind the other: their names; of each, place by place, the names of its tensors and submodules."""

    modules: tuple[str, ...]
    tensors: tuple[tuple[str, ...], ...]
    submodules: tuple[tuple[str, ...], ...]

    def kept(self, copy: int) -> int:
        """Which of the calls the copy is that was traced."""
        return copy if copy < KEPT // 2 else len(self.modules) - KEPT + copy


@dataclass(frozen=True)
class Shortened:
    """``attributes``: of those of the captured graph that belong to a copy, row, copy and place among its tensors."""

    rows: tuple[Row, ...]
    attributes: Mapping[str, tuple[int, int, int]]


def candidates(model: nn.Module) -> dict[int, tuple[Hashable, str]]:
    """Modules that may be alike, by id, with their names: children of one parent with the same classes and tensors; the outermost."""
    found: dict[int, tuple[Hashable, str]] = {}
    inside: set[str] = set()
    for name, parent in model.named_modules():
        if name in inside or name.rpartition(".")[0] in inside:
            inside.add(name)
            continue
        groups: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for key, child in parent.named_children():
            if has_hooks(child):
                continue
            groups.setdefault((name, _look(child)), []).append((f"{name}.{key}" if name else key, child))
        for group, members in groups.items():
            if len(members) > KEPT:
                found.update({id(child): (group, path) for path, child in members})
                inside.update(path for path, _ in members)
    return found


def _look(module: nn.Module) -> Hashable:
    first: dict[int, int] = {}
    tensors = [(k, t.shape, t.dtype, t.requires_grad, first.setdefault(id(t), len(first))) for k, t in _tensors(module).items()]
    return tuple((name, type(m), m.training) for name, m in module.named_modules(remove_duplicate=False)), tuple(tensors)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def shorten(captured: fx.GraphModule, model: nn.Module, repeats: Repeats) -> Shortened | None:
    """Writes out the calls that stand for others, and leaves out the middle of long rows of them; None where there is no long row."""
    writer = _Writer(captured, model)
    for number, traced in enumerate(repeats.traced):
        stubs = [n for n in captured.graph.nodes if n.target is repeat and n.args[0] == number]
        if stubs:
            body = writer.call_of(traced)
            for row in _in_rows(captured.graph, body, [_stub_call(n) for n in stubs]):
                writer.write(body, row)
    writer.order_attributes()
    captured.graph.lint()
    captured.recompile()
    if not writer.rows:
        return None
    writer.check_owners()
    return Shortened(tuple(writer.rows), writer.attributes)


def label(captured: fx.GraphModule, shortened: Shortened) -> None:
    """Nodes that were put behind a labelled one since, such as casts of parameters, are of its copy; the others of none."""
    for node in captured.graph.nodes:
        custom = node.meta.get("custom") or {}
        read = node.all_input_nodes
        if LABEL not in custom and len(read) == 1 and read[0].op == "get_attr":
            custom = {**custom, LABEL: read[0].meta["custom"][LABEL]}
        node.meta["custom"] = {LABEL: None, **custom}


@dataclass
class _Call:
    """A call of a module: its name, its nodes, the tensors that it reads and, by place, those that it gives."""

    module: str
    nodes: list[fx.Node]
    read: list[fx.Node]
    given: dict[int, fx.Node]
    stub: bool = False


def _stub_call(node: fx.Node) -> _Call:
    given = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return _Call(str(node.args[1]), [node, *given.values()], list(node.args[2:]), given, True)


def _in_rows(graph: fx.Graph, first: _Call, stubs: Sequence[_Call]) -> list[list[_Call]]:
    """The calls in rows: one right behind the other, from the second on each reads of the one before what the others do."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    rows = [[first]]
    for call in stubs:
        row, before = rows[-1], rows[-1][-1]
        follows = place[call.nodes[0]] == max(place[n] for n in before.nodes) + 1
        if follows and len(row) > 1:
            only = all(set(n.users) <= {call.nodes[0]} for n in before.given.values())
            follows = only and _ways(call, before) == _ways(before, row[-2])
        if follows:
            row.append(call)
        else:
            rows.append([call])
    return rows


def _ways(call: _Call, before: _Call) -> list[int | fx.Node]:
    """Of each tensor that ``call`` reads: which one of those that the call before gives it is, or what else."""
    place = {node: k for k, node in before.given.items()}
    return [place.get(n, n) for n in call.read]


class _Writer:
    """Writes bodies in the place of the calls that stand for others."""

    def __init__(self, captured: fx.GraphModule, model: nn.Module) -> None:
        self.captured, self.graph, self.model = captured, captured.graph, model
        self.rows: list[Row] = []
        self.attributes: dict[str, tuple[int, int, int]] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.by_name = {n.name: n for n in captured.graph.nodes}
        self.values = _tensors(captured)
        self.targets = {id(value): name for name, value in self.values.items()}
        self.first_names = {id(t): name for name, t in reversed(_tensors(model).items())}
        self.module_names = {id(m): name for name, m in model.named_modules()}

    def call_of(self, traced: Traced) -> _Call:
        """The call that was traced."""
        nodes = [self.by_name[n.name] for n in traced.nodes if n.name in self.by_name]
        read, given = ([self._now(self.by_name[n.name]) for n in those] for those in (traced.read, traced.given))
        if any(n.target is repeat for n in nodes):
            raise NotAlike(f"{traced.module} calls layers that are alike itself")
        return _Call(traced.module, nodes, read, {k: node for k, node in enumerate(given) if node not in read})

    def write(self, body: _Call, row: list[_Call]) -> None:
        """Writes out a row; a long one without its middle."""
        kept = row
        if len(row) > KEPT:
            for call in row[2:-2]:
                self._leave_out(call, row[1])
            kept = [*row[:2], *row[-2:]]
            own = self._own(body, row[1:])
            tensors = [tuple(self.first_names[id(held[k])] for k in own) for held in (_tensors(self._module(c)) for c in row)]
            modules = [[m for _, m in self._module(c).named_modules(remove_duplicate=False)] for c in row]
            names = tuple(tuple(self.module_names[id(m)] for m in held) for held in modules)
            self.rows.append(Row(tuple(c.module for c in row), tuple(tensors), names))
        for copy, call in enumerate(kept):
            nodes = self._written(body, call) if call.stub else body.nodes
            if kept is not row:
                self._label(nodes, copy, self.rows[-1].tensors[self.rows[-1].kept(copy)])

    def order_attributes(self) -> None:
        """As Dynamo has them: in the order in which they are read."""
        first = {str(n.target): k for k, n in reversed(list(enumerate(self.graph.nodes))) if n.op == "get_attr"}
        order_tensors(self.captured, lambda name: first.get(name, -1))

    def check_owners(self) -> None:
        """Raises NotAlike where a tensor of a row's module is read outside of the module's call."""
        owners = {name: (r, k) for r, row in enumerate(self.rows) for k, names in enumerate(row.tensors) for name in names}
        for node in self.graph.nodes:
            if node.op == "get_attr" and id(self._value(node)) in self.first_names:
                name = self.first_names[id(self._value(node))]
                at = (node.meta.get("custom") or {}).get(LABEL)
                if name in owners and (at is None or (at[0], self.rows[at[0]].kept(at[1])) != owners[name]):
                    raise NotAlike(f"{name} is read outside of its layer")

    def _module(self, call: _Call) -> nn.Module:
        return self.model.get_submodule(call.module)

    def _value(self, node: fx.Node) -> Any:
        return self.values.get(str(node.target))

    def _own(self, body: _Call, others: Sequence[_Call]) -> list[str]:
        """The names within the module of the tensors that its call reads and each call has one of its own of, in order."""
        names = {id(t): name for name, t in reversed(_tensors(self._module(body)).items())}
        read = dict.fromkeys(names[id(self._value(n))] for n in body.nodes if n.op == "get_attr" and id(self._value(n)) in names)
        held = [_tensors(self._module(call)) for call in (body, *others)]
        own = []
        for name in read:
            different = len({id(tensors[name]) for tensors in held})
            if different not in (1, len({call.module for call in (body, *others)})):
                raise NotAlike(f"some of the layers share {name}, others do not")
            if different > 1:
                own.append(name)
        return own

    def _leave_out(self, call: _Call, before: _Call) -> None:
        for k, node in call.given.items():
            if k in before.given:
                self._replace(node, before.given[k])
            elif node.users:
                raise NotAlike(f"{call.module} gives what {before.module} does not")
        self._erase(call)

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        self.replaced[node] = other

    def _now(self, node: fx.Node) -> fx.Node:
        """What stands in the place of a node that may be gone."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _erase(self, call: _Call) -> None:
        for node in reversed(call.nodes):
            self.graph.erase_node(node)

    def _written(self, body: _Call, call: _Call) -> list[fx.Node]:
        """The body's nodes for another module, in the place of its stub."""
        tensors = self._counterparts(body, call)
        old, new = (self._module(c).named_modules(remove_duplicate=False) for c in (body, call))
        modules = {self.module_names[id(a)]: self.module_names[id(b)] for (_, a), (_, b) in zip(old, new, strict=True)}
        copies: dict[fx.Node, fx.Node] = dict(zip(body.read, call.nodes[0].args[2:], strict=True))
        made = []
        with self.graph.inserting_before(call.nodes[0]):
            for node in body.nodes:
                copy = self.graph.node_copy(node, lambda n: copies.get(n, n))
                copy.meta = renamed_meta(node.meta, body.module, call.module)
                if node.op == "get_attr":
                    copy.target = self._attribute(node, tensors)
                elif node.target is RETURNED:
                    copy.args = (copy.args[0], modules.get(str(node.args[1]), node.args[1]))
                copies[node] = copy
                made.append(copy)
        for k, node in call.given.items():
            self._replace(node, copies[body.given[k]])
        self._erase(call)
        call.given = {k: copies[n] for k, n in body.given.items()}
        return made

    def _counterparts(self, body: _Call, call: _Call) -> dict[int, torch.Tensor]:
        mine, theirs = _tensors(self._module(body)), _tensors(self._module(call))
        return {id(t): theirs[name] for name, t in mine.items()}

    def _attribute(self, node: fx.Node, tensors: Mapping[int, torch.Tensor]) -> str:
        value = self._value(node)
        if id(value) not in self.first_names:  # of another tensor Dynamo's guards say what it looks like, not what is in it
            raise NotAlike(f"{node.target} is no parameter or buffer of the model")
        other = tensors.get(id(value), value)
        if id(other) not in self.targets:
            name = "L__self___" + self.first_names[id(other)].replace(".", "_")
            while name in self.values:
                name += "_"
            if isinstance(other, nn.Parameter):
                self.captured.register_parameter(name, other)
            else:
                self.captured.register_buffer(name, other)
            self.targets[id(other)], self.values[name] = name, other
        return self.targets[id(other)]

    def _label(self, nodes: Sequence[fx.Node], copy: int, own: Sequence[str]) -> None:
        at = len(self.rows) - 1, copy
        for node in nodes:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), LABEL: at}
            if node.op == "get_attr" and (name := self.first_names.get(id(self._value(node)))) in own:
                self.attributes[str(node.target)] = *at, own.index(name)


STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def renamed_meta(meta: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Of a node in the module ``old``, for its copy in ``new``."""
    changed = dict(meta)
    for stack in STACKS:
        if meta.get(stack):
            changed[stack] = OrderedDict((k, (_renamed(path, old, new), kind)) for k, (path, kind) in meta[stack].items())
    return changed


@lru_cache(maxsize=4096)
def _renamed(path: str, old: str, new: str) -> str:
    return pattern(old).sub(rf"\g<1>{new}\g<2>", path, count=1)


@lru_cache
def pattern(module: str) -> re.Pattern[str]:
    """Where the name of a module stands in a path as Dynamo writes it."""
    return re.compile(rf"(\.){re.escape(module)}(\.|$)")
