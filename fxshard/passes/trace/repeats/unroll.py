"""Inserts the layers that ``shorten`` removed into the joint graph traced without them.

The graph consists of blocks, one per kept layer of a row in the forward and one in the backward. The two inner layers must be identical up
to their position; then any number of copies can stand between them. Node names are numbered as if every layer had been traced.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.aot import BufferAOTInput, GradAOTOutput, InputMutationAOTOutput, ParamAOTInput
from fxshard._torch_compat.nodes import NodeMaker
from fxshard._torch_compat.sizes.symbols import plain
from fxshard.passes.trace.functions.draws import NUMBERED
from fxshard.passes.trace.repeats.shorten import KEPT, LABEL, RETURNED, Label, NotAlike, Row, Shortened, renamed_meta

INNER = (1, 2)
"""The kept layers that are compared, and copied."""
STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators that address memory, which are not copied: a copy would address the original's memory."""


def unroll(joint: fx.GraphModule, shortened: Shortened) -> None:
    """Inserts the removed layers, in place; raises NotAlike if the kept ones differ."""
    _Unroller(joint, shortened).run()


@dataclass(frozen=True)
class _Place:
    """The position of a node: its row, its layer among the kept ones, its pass through the row, and its index in the block."""

    row: int
    copy: int
    row_pass: int
    index: int


@dataclass(frozen=True)
class _RowPass:
    """One pass through the layers of a row: their consecutive blocks, by layer. ``down``: the last layer comes first (a backward)."""

    number: int
    row: int
    blocks: tuple[list[Any], ...]
    down: bool


class _Unroller:
    def __init__(self, joint: fx.GraphModule, shortened: Shortened) -> None:
        self.joint, self.rows, self.attributes = joint, shortened.rows, shortened.attributes
        self.nodes = list(joint.graph.nodes)[:-1]
        self.output = joint.graph.output_node()
        self.place: dict[fx.Node, _Place] = {}
        self.graph = fx.Graph()
        self.new = NodeMaker(self.graph)
        self.made: dict[fx.Node, fx.Node] = {}
        self.put: dict[tuple[int, int, int], fx.Node] = {}
        self.shift: dict[str, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.fresh = itertools.count(1 << 32)
        self.row_passes: list[_RowPass] = []

    def run(self) -> None:
        labels = self._labels()
        parts = self._parts(list(zip(self.nodes, labels, strict=True)))
        own = {node for node, (label, _) in zip(self.nodes, labels, strict=True) if label is not None}
        for row_pass in self.row_passes:
            for copy, block in enumerate(row_pass.blocks):
                self.place.update({node: _Place(row_pass.row, copy, row_pass.number, i) for i, node in enumerate(block) if node in own})
        for part in parts:
            if isinstance(part, _RowPass):
                self._compare(part)
                self._emit_pass(part)
            else:
                self._emit(part)
        self._emit_output()
        self.joint.graph = self.graph

    # Blocks

    def _labels(self) -> list[tuple[Label, Any]]:
        """(label, kind of block) of each node. Nodes without a label, such as autograd's gradient sums, get that of the node before."""
        labels: list[tuple[Label, Any]] = []
        last: Label = None
        for node in self.nodes:
            if node.op == "placeholder":
                labels.append((self._owner(node.meta.get("desc")), "placeholder"))
                continue
            last = (node.meta.get("custom") or {}).get(LABEL, last)
            labels.append((last, node.meta.get("partitioner_tag")))
        return labels

    def _owner(self, desc: Any) -> Label:
        if isinstance(desc, (ParamAOTInput, BufferAOTInput)) and desc.target in self.attributes:
            return self.attributes[desc.target][:2]
        return None

    def _parts(self, labelled: Sequence[tuple[Any, Any]]) -> list[_RowPass | list[Any]]:
        """Splits the graph into passes through rows, and the nodes between them."""
        blocks = _joined([(key, [item for item, _ in items]) for key, items in itertools.groupby(labelled, key=lambda pair: pair[1])])
        parts: list[_RowPass | list[Any]] = []
        while blocks:
            (label, _), items = blocks[0]
            if label is None:
                parts.append(items)
                del blocks[0]
                continue
            copies = [key[0] for key, _ in blocks[:KEPT]]
            up = [(label[0], copy) for copy in range(KEPT)]
            if copies not in (up, up[::-1]):
                raise NotAlike("its layers do not run one after the other")
            made = tuple(items for _, items in blocks[:KEPT])
            down = copies != up
            row_pass = _RowPass(len(self.row_passes), label[0], made[::-1] if down else made, down)
            self.row_passes.append(row_pass)
            parts.append(row_pass)
            del blocks[:KEPT]
        return parts

    # Comparison

    def _compare(self, row_pass: _RowPass) -> None:
        """Raises NotAlike unless the two inner layers are identical up to their position."""
        one, two = (row_pass.blocks[c] for c in INNER)
        if len(one) != len(two):
            raise NotAlike(f"a layer has {len(one)} operators, the next one {len(two)}")
        for a, b in zip(one, two, strict=True):
            if not self._same(a, b):
                raise NotAlike(f"{a.name} of a layer and {b.name} of the next one differ")

    def _same(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op != b.op or _metadata(a) != _metadata(b) or a.target in STRIDED:
            return False
        if a.op == "get_attr":
            mine, theirs = (getattr(self.joint, str(n.target)) for n in (a, b))
            return isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and torch.equal(mine, theirs)
        if a.op == "placeholder":
            mine, theirs = (self.attributes[n.meta["desc"].target][2] for n in (a, b))
            return bool(mine == theirs)
        if a.target != b.target:
            return False
        mine, theirs = (pytree.tree_flatten((_unnumbered(n), n.kwargs)) for n in (a, b))
        return mine[1] == theirs[1] and all(map(self._same_argument, mine[0], theirs[0]))

    def _same_argument(self, a: Any, b: Any) -> bool:
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return type(a) is type(b) and repr(a) == repr(b)
        mine, theirs = self.place.get(a), self.place.get(b)
        if mine is None or theirs is None or mine.row != theirs.row:
            return a is b and (mine is None or mine.copy not in INNER)
        inner = mine.copy in INNER and theirs.copy in INNER
        return mine.row_pass == theirs.row_pass and theirs.copy - mine.copy == 1 and (not inner or mine.index == theirs.index)

    # Emission

    def _emit_pass(self, row_pass: _RowPass) -> None:
        row = self.rows[row_pass.row]
        order = range(KEPT - 1, -1, -1) if row_pass.down else range(KEPT)
        first, second = INNER[::-1] if row_pass.down else INNER
        steps = _steps(row_pass.blocks[first], row_pass.blocks[second])
        between = range(KEPT // 2, len(row.modules) - KEPT // 2)
        for copy in order:
            self._emit(row_pass.blocks[copy])
            if copy == first:
                for number in reversed(between) if row_pass.down else between:
                    for base, step in steps.items():
                        self.shift[base] = self.shift.get(base, 0) + step
                    for index, node in enumerate(row_pass.blocks[first]):
                        self._put(row_pass, row, number, index, self._counted(node.name))

    def _counted(self, name: str) -> str:
        """The name of a node, its number shifted by the layers inserted so far."""
        base, number = _split(name)
        number += self.shift.get(base, 0)
        return f"{base}_{number}" if number else base

    def _emit(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), partial(self._read, self.place.get(node)))
            self.made[node] = self._add(node, args, kwargs, self._counted(node.name), dict(node.meta))

    def _put(self, row_pass: _RowPass, row: Row, number: int, index: int, name: str) -> None:
        """Emits the node at ``index`` of a block for the removed layer ``number``."""
        one, two = (row_pass.blocks[c][index] for c in INNER)
        args, kwargs = _zipped((one.args, one.kwargs), (two.args, two.kwargs), lambda a, b: self._between(number, a, b))
        meta = renamed_meta(one.meta, row.modules[1], row.modules[number])
        if one.op == "placeholder":
            desc = one.meta["desc"]
            meta["desc"] = type(desc)(row.tensors[number][self.attributes[desc.target][2]])
        if one.target is RETURNED:
            names = dict(zip(row.submodules[1], row.submodules[number], strict=True))
            args = (args[0], names.get(args[1], args[1]))
        if one.target in NUMBERED:
            at = NUMBERED[one.target]
            key = (one.args[at], number)
            args = (*args[:at], self.numbers.setdefault(key, next(self.fresh)), *args[at + 1 :])
        self.put[row_pass.number, number, index] = self._add(one, args, kwargs, name, meta)

    def _add(self, node: fx.Node, args: Any, kwargs: Any, name: str, meta: dict[str, Any]) -> fx.Node:
        target = name if node.op == "placeholder" else node.target
        custom = {k: v for k, v in (meta.get("custom") or {}).items() if k != LABEL}
        meta = {**meta, "custom": custom} if custom else {k: v for k, v in meta.items() if k != "custom"}
        return self.new(node.op, target, args, kwargs, name, meta)

    def _between(self, number: int, one: fx.Node, two: fx.Node) -> fx.Node:
        """The operand of layer ``number`` that corresponds to ``one`` and ``two``, the operands of the inner layers."""
        mine, theirs = self.place.get(one), self.place.get(two)
        if mine is None or theirs is None or one is two:
            return self.made[one]
        place, copy = (mine, INNER[0]) if mine.copy in INNER else (theirs, INNER[1])
        return self._of(place, number + place.copy - copy)

    def _read(self, place: _Place | None, read: fx.Node) -> fx.Node:
        """The new node for the operand ``read`` of a node at ``place`` (None outside all rows)."""
        other = self.place.get(read)
        if other is None:
            return self.made[read]
        if place is None or place.row != other.row:
            if other.copy in INNER:
                raise NotAlike(f"{read.name} of a layer is read outside of it")
            return self.made[read]
        return self._of(other, self.rows[place.row].index_of(place.copy) + other.copy - place.copy)

    def _of(self, place: _Place, number: int) -> fx.Node:
        """The new node at this position of its block in layer ``number``."""
        row, half = self.rows[place.row], KEPT // 2
        count = len(row.modules)
        if half <= number < count - half:
            return self.put[place.row_pass, number, place.index]
        copy = number if number < half else number - count + KEPT
        block = self.row_passes[place.row_pass].blocks[copy]
        if place.index >= len(block):
            raise NotAlike("its first or last layer is unlike the others")
        return self.made[block[place.index]]

    # Outputs

    def _emit_output(self) -> None:
        entries = list(zip(self.output.args[0], self.output.meta["desc"], strict=True))
        keys = [(self._owner(_about(desc)), type(desc)) for _, desc in entries]
        values: list[Any] = []
        descs: list[Any] = []
        for part in self._parts(list(zip(entries, keys, strict=True))):
            for value, desc in self._results(part) if isinstance(part, _RowPass) else [(self._result(v, d), d) for v, d in part]:
                values.append(value)
                descs.append(desc)
        end = self.graph.output(tuple(values))
        end.meta = {**self.output.meta, "desc": descs}

    def _result(self, value: Any, desc: Any) -> Any:
        owner = self._owner(_about(desc))
        if not isinstance(value, fx.Node):
            return value
        if owner is None:
            return self._read(None, value)
        return self._read(_Place(*owner, -1, -1), value)

    def _results(self, row_pass: _RowPass) -> list[tuple[Any, Any]]:
        row, half = self.rows[row_pass.row], KEPT // 2
        if row_pass.down or len(row_pass.blocks[1]) != len(row_pass.blocks[2]):
            raise NotAlike("its layers do not have the same gradients")
        made = []
        for number in range(len(row.modules)):
            if half <= number < len(row.modules) - half:
                for (a, about), (b, _) in zip(row_pass.blocks[1], row_pass.blocks[2], strict=True):
                    if not self._same_argument(a, b):
                        raise NotAlike("the gradients of its layers do not come from the same places")
                    end = _about(about)
                    name = row.tensors[number][self.attributes[end.target][2]]
                    made.append((self._between(number, a, b) if isinstance(a, fx.Node) else a, type(about)(type(end)(name))))
            else:
                copy = number if number < half else number - len(row.modules) + KEPT
                made += [(self._result(value, desc), desc) for value, desc in row_pass.blocks[copy]]
        return made


Blocks = list[tuple[tuple[Label, Any], list[Any]]]


def _joined(blocks: Blocks) -> Blocks:
    """Adds unlabelled nodes between two layers of a row to the one of them that is not an inner layer; all layers share such nodes."""
    joined: Blocks = []
    for k, (key, items) in enumerate(blocks):
        before, after = (joined[-1][0] if joined else None), (blocks[k + 1][0] if k + 1 < len(blocks) else None)
        if key[0] is None and _within(before, after):
            assert before is not None and before[0] is not None
            if before[0][1] in INNER:
                blocks[k + 1] = (blocks[k + 1][0], [*items, *blocks[k + 1][1]])
            else:
                joined[-1][1].extend(items)
        elif key[0] is not None and key == before:
            joined[-1][1].extend(items)
        else:
            joined.append((key, items))
    return joined


def _within(before: tuple[Label, Any] | None, after: tuple[Label, Any] | None) -> bool:
    """Whether nodes between these two blocks are within a row, but not between inner layers."""
    if before is None or after is None or before[0] is None or after[0] is None or before[1] != after[1]:
        return False
    return before[0][0] == after[0][0] and not (before[0][1] in INNER and after[0][1] in INNER) and abs(before[0][1] - after[0][1]) < 2


def _about(desc: Any) -> Any:
    """The input whose gradient or new value an output is; None for others."""
    if isinstance(desc, GradAOTOutput):
        return desc.grad_of
    return desc.mutated_input if isinstance(desc, InputMutationAOTOutput) else None


def _metadata(node: fx.Node) -> list[Any]:
    """Shape, dtype, memory layout and strides of each tensor that a node returns."""
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    strides = [tuple(map(plain, v.stride())) if v.layout == torch.strided else None for v in values]
    return [(tuple(map(plain, v.shape)), v.dtype, v.layout, stride) for v, stride in zip(values, strides, strict=True)]


def _unnumbered(node: fx.Node) -> tuple[Any, ...]:
    """The arguments without a draw's number or a module's name, which differ between layers."""
    left_out = NUMBERED.get(node.target, 1 if node.target is RETURNED else None)
    return node.args if left_out is None else (*node.args[:left_out], *node.args[left_out + 1 :])


def _zipped(a: Any, b: Any, make: Any) -> Any:
    """The structure of ``a`` and ``b`` with ``make(node of a, node of b)`` for each pair of nodes."""
    if isinstance(a, fx.Node):
        return make(a, b)
    if isinstance(a, (list, tuple)):
        return type(a)(_zipped(x, y, make) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {k: _zipped(v, b[k], make) for k, v in a.items()}
    if isinstance(a, slice):
        return slice(*(_zipped(getattr(a, k), getattr(b, k), make) for k in ("start", "stop", "step")))
    return a


@lru_cache(maxsize=65536)
def _split(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)_(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)


def _steps(first: Sequence[fx.Node], second: Sequence[fx.Node]) -> dict[str, int]:
    """For each base name, the increase of its number from one layer to the next."""
    steps: dict[str, int] = {}
    for a, b in zip(first, second, strict=True):
        (base, mine), (other, theirs) = _split(a.name), _split(b.name)
        if base == other:
            steps.setdefault(base, theirs - mine)
    return steps
