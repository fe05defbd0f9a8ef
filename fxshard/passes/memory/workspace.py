"""Workspace: memory that a node or redistribution needs while it runs, beyond its operands and results.

For a node, its lowered form is emitted for the largest shards and run on fake tensors with the CPU's kernels. For a redistribution, the
buffers are computed without emitting it (``step_buffers``), because many pairs of layouts are asked for; a step is emitted, and its tensors
counted, only if it has so many chunks that it handles them all at once. So the memory reported for a plan is that of its program. Memory
that torch's kernels allocate internally is not counted in either case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.operators import schema_of
from fxshard.cost.workspace import peak_bytes
from fxshard.graph.call import Call, call_of
from fxshard.graph.planning_graph import UNKNOWN, VIEWS, depends_on_run_time, is_tensor, operands, outputs_of, plain_shape
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout, ceil_shape
from fxshard.layout.redistribution import PathTable, Step, walk
from fxshard.mesh.mesh import Mesh
from fxshard.ops.kernels import ALLOCATIONS, KERNELS
from fxshard.passes.lowering.context import Context
from fxshard.passes.lowering.emit import emit_step, takes_all_at_once
from fxshard.passes.lowering.local_graph import FAKES, LocalGraph
from fxshard.passes.memory.step_buffers import makes_anew, stages
from fxshard.plans.plan_data import OpSpec
from fxshard.solver import Timeline
from fxshard.strategies import local_form, lookup

_CACHE: dict[Any, Any] = {}
"""Bytes by everything that they depend on: layers repeat, and one operator has few distinct layouts."""
CACHE_LIMIT = 200_000
T = TypeVar("T")


def of_node(node: fx.Node, specs: Sequence[OpSpec], dying: Sequence[bool], mesh: Mesh) -> np.ndarray:
    """(specs,) bytes beyond operands and results while ``node`` runs; ``dying``: the operands that nobody needs after it."""
    key = node_key(node, dying)
    if key is None:
        return np.zeros(len(specs))
    call = key[0]

    def find(spec: OpSpec) -> int:
        return _cached((key, spec, mesh.shape), partial(_bytes_of_node, node, call, spec, dying, mesh))

    return np.array([find(spec) for spec in specs], dtype=np.float64)


def node_key(node: fx.Node, dying: Sequence[bool]) -> tuple[Any, ...] | None:
    """A key that is equal for nodes with equal workspace under equal specs; None if ``may_need`` is False."""
    if not may_need(node):
        return None
    read = operands(node)
    return call_of(node), tuple(o.meta["val"].stride() for o in read), tuple(map(read.index, read)), _used_results(node), tuple(dying)


def may_need(node: fx.Node) -> bool:
    """Whether the node may need workspace; a single torch operator, all of whose results are read, does not."""
    if node.op != "call_function" or name_of(node.target) in VIEWS:
        return False
    entry = lookup(name_of(node.target))
    local = node.target in KERNELS or (entry is not None and entry.local is not None)
    if not local and is_tensor(node):  # one result
        return False
    return not depends_on_run_time(node) and (local or len(_used_results(node)) != sum(v is not None for v in outputs_of(node)))


@dataclass(frozen=True)
class PathMemory:
    """Memory of a path between two layouts on the largest rank, in bytes.

    ``peak``: with the input and the result; ``excess``: of the result's storage over the result; ``new_storage``: whether that is not the
    input's.
    """

    peak: int
    excess: int = 0
    new_storage: bool = True

    def then(self, other: PathMemory, given: int) -> PathMemory:
        """This path followed by ``other``; ``given``: bytes of the input if it stays alive."""
        excess = other.excess if other.new_storage else self.excess
        return PathMemory(max(self.peak, other.peak + self.excess + given), excess, self.new_storage or other.new_storage)


def of_move(value: torch.Tensor, source: Layout, steps: Sequence[Step], mesh: Mesh) -> tuple[int, int]:
    """(workspace in bytes of redistributing ``value`` from ``source``, excess bytes of the result's storage over its shard)."""
    shape, dense = plain_shape(value.shape), value.is_contiguous()
    if not steps or UNKNOWN in shape:
        return 0, 0
    key = "move", shape, value.dtype, dense, source, tuple(steps), mesh.shape
    return _cached(key, lambda: _bytes_of_move(shape, value.dtype, dense, source, steps, mesh))


def _bytes_of_move(
    shape: tuple[int, ...], dtype: torch.dtype, dense: bool, source: Layout, steps: Sequence[Step], mesh: Mesh
) -> tuple[int, int]:
    path = list(walk(source, tuple(steps)))
    ends = [number for number, (_, _, after) in enumerate(path, 1) if not after.is_folded or number == len(path)]
    first, last = (math.prod(ceil_shape(shape, at, mesh.shape)) * dtype.itemsize for at in (source, path[-1][2]))
    parts = [path[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    found = _path_memory(parts[0], shape, dtype, dense, True, mesh)
    for part in parts[1:]:
        found = found.then(_path_memory(part, shape, dtype, True, False, mesh), first)
    return max(0, found.peak - first - last - found.excess), found.excess


def of_moves(value: torch.Tensor, paths: PathTable, layouts: Sequence[Layout | None]) -> tuple[np.ndarray, np.ndarray]:
    """The same for all pairs of layouts: (from, to) bytes each, 0 where one is None."""
    shape = plain_shape(value.shape)
    return _moves(paths, shape, value.dtype, UNKNOWN not in shape and value.is_contiguous()).between(layouts)


@dataclass
class _Moves:
    """Memory of the paths of a table. ``shape``: the tensor's, which may differ from the table's; ``dense``: the input has no gaps."""

    paths: PathTable
    shape: tuple[int, ...]
    dtype: torch.dtype
    dense: bool
    sizes: list[int]
    path_memories: dict[tuple[int, int, bool], PathMemory] = field(default_factory=dict)

    def between(self, layouts: Sequence[Layout | None]) -> tuple[np.ndarray, np.ndarray]:
        meanwhile, excess = (np.zeros((len(layouts), len(layouts))) for _ in range(2))
        if UNKNOWN in self.shape:
            return meanwhile, excess
        there = [(k, self.paths.index[at]) for k, at in enumerate(layouts) if at is not None]
        for (row, i), (column, j) in itertools.permutations(there, 2):
            if np.isfinite(self.paths.prices[i, j]):
                way = self.along(i, j)
                meanwhile[row, column] = max(0, way.peak - self.sizes[i] - self.sizes[j] - way.excess)
                excess[row, column] = way.excess
        return meanwhile, excess

    def along(self, i: int, j: int) -> PathMemory:
        """The path from layout i, of a value that stays alive, to layout j."""
        first, *rest = itertools.pairwise(self.paths.path(i, j))
        found = self._direct(*first, True)
        for part in rest:
            found = found.then(self._direct(*part, False), self.sizes[i])
        return found

    def _direct(self, i: int, j: int, stays: bool) -> PathMemory:
        """The same between two layouts with no plain layout in between; ``stays``: whether the input stays alive."""
        if (i, j, stays) not in self.path_memories:
            path = list(walk(self.paths.layouts[i], self.paths.direct(i, j)))
            self.path_memories[i, j, stays] = _path_memory(
                path, self.shape, self.dtype, self.dense or not stays, stays, self.paths.tensor[2]
            )
        return self.path_memories[i, j, stays]


@lru_cache(maxsize=512)
def _moves(paths: PathTable, shape: tuple[int, ...], dtype: torch.dtype, dense: bool) -> _Moves:
    _, itemsize, mesh = paths.tensor
    sizes = [] if UNKNOWN in shape else [math.prod(ceil_shape(shape, at, mesh.shape)) * itemsize for at in paths.layouts]
    return _Moves(paths, shape, dtype, dense, sizes)


Path = Sequence[tuple[Layout, Step, Layout]]


def _path_memory(path: Path, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, stays: bool, mesh: Mesh) -> PathMemory:
    """Memory of a path without plain layouts in between; ``stays``: its input is a value that stays alive, not an intermediate result."""
    if any(takes_all_at_once(step, layout, shape, mesh) for layout, step, _ in path):
        return _emitted_memory(path, shape, dtype, dense, stays, mesh)
    sizes = [math.prod(ceil_shape(shape, at, mesh.shape)) * dtype.itemsize for at in (*(layout for layout, _, _ in path), path[-1][2])]
    peak = 0
    for number, (layout, step, _) in enumerate(path):
        found = stages(step, layout, shape, dtype, dense or number > 0, mesh)
        here = max(taken + (sizes[number] if reads or (stays and not number) else 0) for taken, reads in found)
        peak = max(peak, here + (sizes[0] if stays and number else 0))
    return PathMemory(peak, 0, any(makes_anew(step, layout, shape, mesh) for layout, step, _ in path))


def _emitted_memory(path: Path, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, stays: bool, mesh: Mesh) -> PathMemory:
    """The same from the emitted steps. An input with gaps gets a gap after every element, so that it never passes as dense."""
    local, given = LocalGraph(mesh, (0,) * mesh.ndim), ceil_shape(shape, path[0][0], mesh.shape)
    x = local.placeholder("x", given, torch.empty(0, dtype=dtype, device="meta"))
    size = _bytes(x.meta["val"])
    if not dense:
        strides = [2 * stride for stride in x.meta["val"].stride()]
        x.meta["val"] = torch.empty_strided(given, strides, dtype=dtype, device="meta")
    result = x
    for layout, step, _ in path:
        result, _ = emit_step(local, result, step, layout, shape)
    peak, base = _peak_from_metadata(local.graph, stays, result)
    made = math.prod(ceil_shape(shape, path[-1][2], mesh.shape)) * dtype.itemsize
    return PathMemory(peak - _bytes(x.meta["val"]) + size, 0 if base is x else _bytes(base.meta["val"]) - made, base is not x)


def _peak_from_metadata(graph: fx.Graph, stays: bool, result: fx.Node) -> tuple[int, fx.Node]:
    """(peak bytes while the calls of a path run, the node whose memory holds the result), from the metadata of the nodes: faster than
    running them (``_peak_of_run``). ``stays``: whether the input stays alive."""
    base: dict[fx.Node, fx.Node] = {}
    spans: dict[fx.Node, tuple[int, int]] = {}
    for time, node in enumerate(graph.nodes):
        base[node] = base[node.args[0]] if node.op == "call_function" and _returns_its_input(node.target) else node
        for one in {base[node], *map(base.__getitem__, node.all_input_nodes)}:
            spans[one] = spans.get(one, (time, 0))[0], time + 1
    end = len(graph.nodes)
    for node in spans:
        if node is base[result] or (stays and node.op == "placeholder"):
            spans[node] = spans[node][0], end
    allocations = [n for n in spans if n.target is not torch.ops.fxshard.axis_index.default]  # inputs of a bound program
    return round(Timeline.of([spans[n] for n in allocations], [_bytes(n.meta["val"]) for n in allocations]).peak()[1]), base[result]


def _returns_its_input(target: Any) -> bool:
    """Whether an operator of a redistribution step returns its input: as a view, or as the result of a collective."""
    schema = schema_of(target)
    return target is torch.ops._c10d_functional.wait_tensor.default or (schema is not None and schema.returns[0].alias_info is not None)


def _cached(key: Any, make: Callable[[], T]) -> T:
    if key not in _CACHE:
        while len(_CACHE) >= CACHE_LIMIT:
            _CACHE.pop(next(iter(_CACHE)))
        _CACHE[key] = make()
    return _CACHE[key]


def _used_results(node: fx.Node) -> tuple[int, ...]:
    """The indices of a node's results that are values of the graph."""
    return (0,) if is_tensor(node) else tuple(sorted({int(u.args[1]) for u in node.users}))


def _bytes_of_node(node: fx.Node, call: Call, spec: OpSpec, dying: Sequence[bool], mesh: Mesh) -> int:
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
    many = (
        [results]
        if is_tensor(node)
        else [results[k] if isinstance(results, tuple) else local.item(results, k) for k in _used_results(node)]
    )
    taken = _peak_of_run(local.graph, dies, many)
    given_bytes = sum(_bytes(n.meta["val"]) for n in given.values())
    outs = [(v, spec.outputs[k]) for k in _used_results(node) if (v := outputs_of(node)[k]) is not None]
    made = sum(math.prod(ceil_shape(v.shape, at, mesh.shape)) * v.dtype.itemsize for v, at in outs if at is not None)
    return max(0, taken - given_bytes - made)


def _placeholder(local: LocalGraph, value: torch.Tensor, layout: Layout) -> fx.Node:
    """A shard with the dim order in memory of ``value``."""
    shape = ceil_shape(plain_shape(value.shape), layout, local.mesh.shape)
    node, strides, size = local.placeholder("x", shape, value), [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        if value.stride(dim) or shape[dim] == 1:
            strides[dim], size = size, size * max(shape[dim], 1)
    node.meta["val"] = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return node


def _peak_of_run(graph: fx.Graph, dies: Sequence[bool], results: Iterable[fx.Node]) -> int:
    """Peak bytes while ``graph`` runs with the device's kernels; ``dies``: which inputs nobody needs after it."""
    env: dict[fx.Node, Any] = {}
    with FAKES, torch.no_grad():
        ends = [n for n in graph.nodes if n.op == "placeholder"]
        for node in ends:
            value = node.meta["val"]
            env[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        places = [n for n in graph.nodes if n.target is torch.ops.fxshard.axis_index.default]  # inputs of a bound program
        env.update({n: torch.empty((), dtype=torch.int64) for n in places})

        def run() -> list[torch.Tensor]:
            for node in graph.nodes:
                if node not in env:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                    env[node] = (ALLOCATIONS.get(node.target) or KERNELS.get(node.target, node.target))(*args, **kwargs)
            return [env[n] for n in results]

        return peak_bytes(run, [*((env[n], d) for n, d in zip(ends, dies, strict=True))])


def _bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()
