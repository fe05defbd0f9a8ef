"""Repeated layers in a captured graph: the first two and the last two layers of a row are kept, those between are removed.

``unroll`` puts the removed layers back once the rest has become a joint graph.
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
"""Number of layers of a row that are traced: the first and the last may differ from the inner ones in what surrounds them."""
LABEL = "fxshard_alike"
"""Key in a node's meta["custom"], which tracing preserves, for (row, copy): the index of the row, and of the layer among the kept ones."""
Label = tuple[int, int] | None


class NotAlike(Exception):
    """The layers of a row are not alike after all; every layer is then traced separately."""


@dataclass(frozen=True)
class Row:
    """Consecutive calls of equal modules: the modules' names, and for each the names of its tensors and submodules, in matching order."""

    modules: tuple[str, ...]
    tensors: tuple[tuple[str, ...], ...]
    submodules: tuple[tuple[str, ...], ...]

    def index_of(self, copy: int) -> int:
        """The index in the whole row of the traced layer number ``copy``."""
        return copy if copy < KEPT // 2 else len(self.modules) - KEPT + copy


@dataclass(frozen=True)
class Shortened:
    """``attributes``: for attributes of the captured graph that belong to a kept layer, (row, copy, index among the layer's tensors)."""

    rows: tuple[Row, ...]
    attributes: Mapping[str, tuple[int, int, int]]


def candidates(model: nn.Module) -> dict[int, tuple[Hashable, str]]:
    """(key of its group, name) by id, of modules that may repeat: the outermost children of one parent with equal classes and tensors."""
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
            groups.setdefault((name, _signature(child)), []).append((f"{name}.{key}" if name else key, child))
        for group, members in groups.items():
            if len(members) > KEPT:
                found.update({id(child): (group, path) for path, child in members})
                inside.update(path for path, _ in members)
    return found


def _signature(module: nn.Module) -> Hashable:
    """Equal for modules with the same classes, modes and tensors."""
    first: dict[int, int] = {}
    tensors = [(k, t.shape, t.dtype, t.requires_grad, first.setdefault(id(t), len(first))) for k, t in _tensors(module).items()]
    return tuple((name, type(m), m.training) for name, m in module.named_modules(remove_duplicate=False)), tuple(tensors)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def shorten(captured: fx.GraphModule, model: nn.Module, repeats: Repeats) -> Shortened | None:
    """Expands the stubs of repeated layers, and removes the middle of long rows; returns None if there is no long row."""
    writer = _Writer(captured, model)
    for number, traced in enumerate(repeats.traced):
        stubs = [n for n in captured.graph.nodes if n.target is repeat and n.args[0] == number]
        if stubs:
            body = writer.call_of(traced)
            for row in _rows(captured.graph, body, [_stub_call(n) for n in stubs]):
                writer.write(body, row)
    writer.order_attributes()
    captured.graph.lint()
    captured.recompile()
    if not writer.rows:
        return None
    writer.check_owners()
    return Shortened(tuple(writer.rows), writer.attributes)


def label(captured: fx.GraphModule, shortened: Shortened) -> None:
    """Labels nodes inserted since: casts of a parameter belong to the parameter's layer, all others to none."""
    for node in captured.graph.nodes:
        custom = node.meta.get("custom") or {}
        read = node.all_input_nodes
        if LABEL not in custom and len(read) == 1 and read[0].op == "get_attr":
            custom = {**custom, LABEL: read[0].meta["custom"][LABEL]}
        node.meta["custom"] = {LABEL: None, **custom}


@dataclass
class _Call:
    """A call of a module: its name, its nodes, the tensors that it reads and, by index, those that it returns."""

    module: str
    nodes: list[fx.Node]
    read: list[fx.Node]
    given: dict[int, fx.Node]
    stub: bool = False


def _stub_call(node: fx.Node) -> _Call:
    given = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return _Call(str(node.args[1]), [node, *given.values()], list(node.args[2:]), given, True)


def _rows(graph: fx.Graph, first: _Call, stubs: Sequence[_Call]) -> list[list[_Call]]:
    """Groups the calls into rows: each directly follows the one before, and reads the same of its results as the others in the row do."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    rows = [[first]]
    for call in stubs:
        row, before = rows[-1], rows[-1][-1]
        follows = place[call.nodes[0]] == max(place[n] for n in before.nodes) + 1
        if follows and len(row) > 1:
            only = all(set(n.users) <= {call.nodes[0]} for n in before.given.values())
            follows = only and _reads_of_previous(call, before) == _reads_of_previous(before, row[-2])
        if follows:
            row.append(call)
        else:
            rows.append([call])
    return rows


def _reads_of_previous(call: _Call, before: _Call) -> list[int | fx.Node]:
    """For each tensor that ``call`` reads: its index among the results of the call before, or the node if it is none of them."""
    place = {node: k for k, node in before.given.items()}
    return [place.get(n, n) for n in call.read]


class _Writer:
    """Replaces stubs by copies of the traced layer."""

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
            raise NotAlike(f"{traced.module} itself calls layers that repeat")
        return _Call(traced.module, nodes, read, {k: node for k, node in enumerate(given) if node not in read})

    def write(self, body: _Call, row: list[_Call]) -> None:
        """Expands the stubs of a row; removes the middle of a long one."""
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
                self._label(nodes, copy, self.rows[-1].tensors[self.rows[-1].index_of(copy)])

    def order_attributes(self) -> None:
        """Orders the attributes by first use, as Dynamo does."""
        first = {str(n.target): k for k, n in reversed(list(enumerate(self.graph.nodes))) if n.op == "get_attr"}
        order_tensors(self.captured, lambda name: first.get(name, -1))

    def check_owners(self) -> None:
        """Raises NotAlike if a tensor of a row's module is read outside the module's call."""
        owners = {name: (r, k) for r, row in enumerate(self.rows) for k, names in enumerate(row.tensors) for name in names}
        for node in self.graph.nodes:
            if node.op == "get_attr" and id(self._value(node)) in self.first_names:
                name = self.first_names[id(self._value(node))]
                at = (node.meta.get("custom") or {}).get(LABEL)
                if name in owners and (at is None or (at[0], self.rows[at[0]].index_of(at[1])) != owners[name]):
                    raise NotAlike(f"{name} is read outside of its layer")

    def _module(self, call: _Call) -> nn.Module:
        return self.model.get_submodule(call.module)

    def _value(self, node: fx.Node) -> Any:
        return self.values.get(str(node.target))

    def _own(self, body: _Call, others: Sequence[_Call]) -> list[str]:
        """The names, within the module, of the tensors that its call reads and that each layer owns separately, in order."""
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
                raise NotAlike(f"{call.module} returns a value that {before.module} does not return")
        self._erase(call)

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        self.replaced[node] = other

    def _now(self, node: fx.Node) -> fx.Node:
        """The node that replaces this one now; the node itself if it was not replaced."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _erase(self, call: _Call) -> None:
        for node in reversed(call.nodes):
            self.graph.erase_node(node)

    def _written(self, body: _Call, call: _Call) -> list[fx.Node]:
        """Replaces a stub by copies of the body's nodes that read the stub's module; returns the copies."""
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
        if id(value) not in self.first_names:  # Dynamo's guards compare the shapes of other tensors, not their values
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
    """A node's meta with the module ``old`` renamed to ``new`` in its module stacks."""
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
    """Matches the name of a module in a path as Dynamo writes it."""
    return re.compile(rf"(\.){re.escape(module)}(\.|$)")
