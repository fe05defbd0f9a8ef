"""What a rank takes for a moment: while a node runs, or a redistribution, beyond what these read and what they give.

A node is emitted as lowering emits it, on the largest shards, and run on fake tensors with the kernels of the CPU; of redistributions
the buffers are known (``buffers``). So what a plan is said to hold is what its program does. What kernels of torch allocate by
themselves is in neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard.call import Call, call_of
from fxshard.cost.workspace import most_at_once
from fxshard.layout import Layout, ceil_shape
from fxshard.mesh import Mesh
from fxshard.ops.kernels import KERNELS
from fxshard.passes.buffers import stages
from fxshard.passes.local_graph import FAKES, LocalGraph
from fxshard.passes.lower import Context
from fxshard.planning_graph import FREE, UNKNOWN, at_run_time, is_tensor, operands, outputs_of, plain_shape
from fxshard.redistribution import Step, Table, walk
from fxshard.sharding_plan import OpSpec
from fxshard.strategies import local_form, lookup
from fxshard.targets import name_of

_FOUND: dict[Any, int] = {}
"""Bytes by all that they follow from: layers are alike, and so are most layouts of one operator."""
MOST = 200_000


def of_node(node: fx.Node, specs: Sequence[OpSpec], dying: Sequence[bool], mesh: Mesh) -> np.ndarray:
    """(specs,) bytes beyond operands and results, while ``node`` runs; ``dying``: the operands that nobody needs after it."""
    alike = run_of(node, dying)
    if alike is None:
        return np.zeros(len(specs))
    call = alike[0]

    def find(spec: OpSpec) -> int:
        return _once((alike, spec, mesh.shape), partial(_node, node, call, spec, dying, mesh))

    return np.array([find(spec) for spec in specs], dtype=np.float64)


def run_of(node: fx.Node, dying: Sequence[bool]) -> tuple[Any, ...] | None:
    """Equal for nodes that take the same in the same spec; None where that is nothing: one operator of torch's, all results read."""
    if not takes(node):
        return None
    read = operands(node)
    return call_of(node), tuple(o.meta["val"].stride() for o in read), tuple(map(read.index, read)), _counted(node), tuple(dying)


def takes(node: fx.Node) -> bool:
    """Whether it may take something: it is not one operator of torch's, all of whose results are read."""
    if node.op != "call_function" or name_of(node.target) in FREE:
        return False
    entry = lookup(name_of(node.target))
    local = node.target in KERNELS or (entry is not None and entry.local is not None)
    if not local and is_tensor(node):  # one result
        return False
    return not at_run_time(node) and (local or len(_counted(node)) != sum(v is not None for v in outputs_of(node)))


def of_move(value: torch.Tensor, source: Layout, steps: Sequence[Step], mesh: Mesh) -> int:
    """Bytes beyond ``value`` in ``source`` and in the layout that it is brought into, while that is done."""
    shape, dense = plain_shape(value.shape), value.is_contiguous()
    if not steps or UNKNOWN in shape:
        return 0
    key = "move", shape, value.dtype, dense, source, tuple(steps), mesh.shape
    return _once(key, lambda: _moved(shape, value.dtype, dense, source, steps, mesh))


def _moved(shape: tuple[int, ...], dtype: torch.dtype, dense: bool, source: Layout, steps: Sequence[Step], mesh: Mesh) -> int:
    path, most = list(walk(source, tuple(steps))), 0
    first, last = (math.prod(ceil_shape(shape, at, mesh.shape)) * dtype.itemsize for at in (source, path[-1][2]))
    for number, (layout, step, _) in enumerate(path):
        most = max(most, _during(step, layout, shape, dtype, dense or number > 0, number == 0, mesh) + (first if number else 0))
    return max(0, most - first - last)


def of_moves(value: torch.Tensor, paths: Table, layouts: Sequence[Layout | None]) -> np.ndarray:
    """(from, to) bytes beyond ``value`` in two layouts while it is brought from one into the other; 0 where one is None."""
    return _moves(paths, plain_shape(value.shape), value.dtype, value.is_contiguous()).between(layouts)


@dataclass
class _Moves:
    """What is alive at most along the paths of a table, by what lies between their ends: path by path would be slow.

    ``shape``: of the tensor, which need not be one that the table is for; ``dense``: whether what is given lies in memory without gaps."""

    paths: Table
    shape: tuple[int, ...]
    dtype: torch.dtype
    dense: bool
    sizes: list[int]
    most: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def between(self, layouts: Sequence[Layout | None]) -> np.ndarray:
        found = np.zeros((len(layouts), len(layouts)))
        if UNKNOWN in self.shape:
            return found
        there = [(k, self.paths.index[at]) for k, at in enumerate(layouts) if at is not None]
        for (row, i), (column, j) in itertools.permutations(there, 2):
            if np.isfinite(self.paths.prices[i, j]):
                found[row, column] = max(0, self.along(i, j, True) - self.sizes[i] - self.sizes[j])
        return found

    def along(self, i: int, j: int, stays: bool) -> int:
        """Bytes alive at most on the way from layout i to layout j; ``stays``: what is given is a value, which lives on."""
        if (i, j, stays) not in self.most:
            middle = int(self.paths.via[i, j])
            if middle < 0:
                found = self._direct(i, j, stays)
            else:
                found = max(self.along(i, middle, stays), self.along(middle, j, False) + (self.sizes[i] if stays else 0))
            self.most[i, j, stays] = found
        return self.most[i, j, stays]

    def _direct(self, i: int, j: int, stays: bool) -> int:
        """The same where no plain layout lies between the two."""
        mesh, most = self.paths.tensor[2], 0
        for number, (layout, step, _) in enumerate(walk(self.paths.layouts[i], self.paths.direct(i, j))):
            given, kept = stays and not number, self.sizes[i] if stays and number else 0
            most = max(most, _during(step, layout, self.shape, self.dtype, self.dense or not given, given, mesh) + kept)
        return most


@lru_cache(maxsize=512)
def _moves(paths: Table, shape: tuple[int, ...], dtype: torch.dtype, dense: bool) -> _Moves:
    _, itemsize, mesh = paths.tensor
    sizes = [] if UNKNOWN in shape else [math.prod(ceil_shape(shape, at, mesh.shape)) * itemsize for at in paths.layouts]
    return _Moves(paths, shape, dtype, dense, sizes)


def _during(step: Step, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, stays: bool, mesh: Mesh) -> int:
    """Bytes alive at most while one step is done; ``stays``: what it reads does, being a value, not what a step before it made."""
    size = math.prod(ceil_shape(shape, layout, mesh.shape)) * dtype.itemsize
    found = stages(step, layout, shape, dtype, dense, mesh)
    return max(taken + (size if stays or reads else 0) for taken, reads in found)


def _once(key: Any, make: Callable[[], int]) -> int:
    if key not in _FOUND:
        while len(_FOUND) >= MOST:
            _FOUND.pop(next(iter(_FOUND)))
        _FOUND[key] = make()
    return _FOUND[key]


def _counted(node: fx.Node) -> tuple[int, ...]:
    """The results of a node that are values of the graph."""
    return (0,) if is_tensor(node) else tuple(sorted({int(u.args[1]) for u in node.users}))


def _node(node: fx.Node, call: Call, spec: OpSpec, dying: Sequence[bool], mesh: Mesh) -> int:
    local = LocalGraph(mesh, (0,) * mesh.ndim)
    context, given, dies = Context(node, call, spec, local), {}, []
    if context.is_empty:
        return 0
    for number, (operand, layout) in enumerate(zip(operands(node), spec.inputs, strict=True)):
        if (operand, layout) not in given:
            given[operand, layout] = _placeholder(local, operand.meta["val"], layout)
            dies.append(dying[number])
    read = iter([given[pair] for pair in zip(operands(node), spec.inputs, strict=True)])
    context.args, context.kwargs = pytree.tree_map(lambda a: next(read) if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs)))
    results = local_form(call)(context)
    many = [results] if is_tensor(node) else [results[k] if isinstance(results, tuple) else local.item(results, k) for k in _counted(node)]
    taken = _most(local.graph, dies, many)
    given_bytes = sum(_bytes(n.meta["val"]) for n in given.values())
    outs = [(v, spec.outputs[k]) for k in _counted(node) if (v := outputs_of(node)[k]) is not None]
    made = sum(math.prod(ceil_shape(v.shape, at, mesh.shape)) * v.dtype.itemsize for v, at in outs if at is not None)
    return max(0, taken - given_bytes - made)


def _placeholder(local: LocalGraph, value: torch.Tensor, layout: Layout) -> fx.Node:
    """A shard whose dims lie in memory in the order in which those of ``value`` do."""
    shape = ceil_shape(plain_shape(value.shape), layout, local.mesh.shape)
    node, strides, size = local.placeholder("x", shape, value), [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        if value.stride(dim) or shape[dim] == 1:
            strides[dim], size = size, size * max(shape[dim], 1)
    node.meta["val"] = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return node


def _most(graph: fx.Graph, dies: Sequence[bool], results: Iterable[fx.Node]) -> int:
    """Bytes alive at most while ``graph`` runs by the device's kernels; ``dies``: which of its inputs nobody needs after it."""
    env: dict[fx.Node, Any] = {}
    with FAKES, torch.no_grad():
        ends = [n for n in graph.nodes if n.op == "placeholder"]
        for node in ends:
            value = node.meta["val"]
            env[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        places = [n for n in graph.nodes if n.target is torch.ops.fxshard.axis_index.default]  # a program is given these
        env.update({n: torch.empty((), dtype=torch.int64) for n in places})

        def run() -> list[torch.Tensor]:
            for node in graph.nodes:
                if node not in env:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                    env[node] = KERNELS.get(node.target, node.target)(*args, **kwargs)
            return [env[n] for n in results]

        return most_at_once(run, [*((env[n], d) for n, d in zip(ends, dies, strict=True))])


def _bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()
