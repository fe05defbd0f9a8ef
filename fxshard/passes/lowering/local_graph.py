"""LocalGraph: builds the graph of one size class node by node and computes local shapes on meta tensors along the way."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode
from fxshard._torch_compat.nodes import NodeMaker, lazy_graph_module, name_of_call
from fxshard._torch_compat.sizes.needless_guards import without_needless_guards
from fxshard._torch_compat.sizes.symbols import are_numbers, plain, surely, symbolic_kernels
from fxshard.graph.planning_graph import UNKNOWN, plain_shape
from fxshard.graph.targets import cached_by_target, target_id
from fxshard.layout.layouts import Layout, chunk, local_shape, packed_chunks
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.replay import Recording

aten = torch.ops.aten

FAKES = FakeTensorMode(allow_non_fake_inputs=True)
"""The mode of the fake values in lowered graphs; during construction, shapes are computed on meta tensors, which is faster."""


CPU_SHAPES = frozenset(
    {
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit_functional.default,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
    }
)
"""Operators that are evaluated on CPU fakes, because their meta kernels give other shapes: statistics have 0 elements on CPU, C on meta."""

SMALLEST_PART = 2.0**-20
"""One step of a local form, as a part of its node's turn."""
INHERITED_META = ("stack_trace", "partitioner_tag", "recompute", "ac_graph_id", "seq_nr")
"""Metadata that a local node inherits from its planning node."""


class Values:
    """The values of calls, computed on meta tensors, and their fakes in ``mode`` for the finished graph.

    Layers repeat, so both are cached, by operator, shapes, strides, dtypes and constants.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.needed: list[tuple[Any, str]] = []
        """(symbolic length that must not be 0, for what)."""
        self._results: dict[Any, Any] = {}
        self._fakes: dict[Any, Any] = {}
        self._tensor_keys: dict[int, tuple[torch.Tensor, Hashable]] = {}  # keeps the tensors alive, so that ids stay unique

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """The value of an input."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def tensor_key(self, value: torch.Tensor) -> Hashable:
        """Shape, strides and dtype, computed once per tensor."""
        found = self._tensor_keys.get(id(value))
        if found is None:
            found = self._tensor_keys[id(value)] = value, (tuple(map(plain, value.shape)), tuple(map(plain, value.stride())), value.dtype)
            _limit_size(self._tensor_keys)
        return found[1]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """A key for everything that the value of a call depends on."""
        return target_id(target), *map(self._key, args), *((name, self._key(kwargs[name])) for name in sorted(kwargs))

    def _key(self, value: Any) -> Hashable:
        """A hashable key; constants include their type, because 1, 1.0 and True are different arguments."""
        kind = type(value)
        if kind is fx.Node:
            value = value.meta["val"]
        elif kind is int:
            return int, value
        if isinstance(value, torch.Tensor):
            return self.tensor_key(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        return type(value), plain(value)

    def on_meta(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads_tensors: bool) -> Any:
        """The value of a call on nodes that hold meta tensors or fakes."""
        key = self._call(target, args, kwargs)
        known = self._results
        if key not in known:
            values, keywords = fx.map_arg((args, kwargs), lambda n: pytree.tree_map_only(torch.Tensor, _on_meta, n.meta["val"]))
            if reads_tensors and target not in CPU_SHAPES and keywords.get("device") is not None:
                keywords = {**keywords, "device": torch.device("meta")}
            with torch.no_grad():
                on_meta = reads_tensors and target not in CPU_SHAPES
                try:
                    known[key] = target(*values, **keywords) if on_meta else self._on_cpu(target, values, keywords)
                except NotImplementedError:  # no meta kernel: fakes run the CPU's on zeros
                    known[key] = self._on_cpu(target, values, keywords)
            _limit_size(known)
        return known[key]

    def fake(self, value: Any) -> Any:
        """The fake of each meta tensor in a structure; a tensor of unknown size stays as traced."""
        return self._fake(value) if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, self._fake, value)

    def _on_cpu(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value computed on fake CPU tensors: for factories, and for operators whose meta kernels give other shapes."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        with self.mode:
            value = target(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _to_meta, value)

    def _fake(self, value: torch.Tensor) -> Any:
        if isinstance(value, FakeTensor):
            return value
        key = self.tensor_key(value)
        if key not in self._fakes:
            with self.mode:
                self._fakes[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            _limit_size(self._fakes)
        return self._fakes[key]


NUMBERS = Values(FAKES)
"""For graphs with numeric sizes."""


class SymbolicValues(Values):
    """For graphs with symbolic sizes: fakes from the start, because plain meta tensors cannot hold symbols."""

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def on_meta(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads_tensors: bool) -> Any:
        key = self._call(target, args, kwargs)
        if key not in self._results:
            values, keywords = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with self.mode, torch.no_grad(), symbolic_kernels():
                self._results[key] = without_needless_guards(self.mode, partial(target, *values, **keywords))
        return self._results[key]


def fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a call on nodes of a finished graph, whose values are fakes."""
    read: list[Any] = []
    fx.map_arg((args, kwargs), lambda node: read.append(node.meta.get("val")))
    mode = next((value.fake_mode for value in read if isinstance(value, FakeTensor)), FAKES)
    known = NUMBERS if mode is FAKES else SymbolicValues(mode)
    return known.fake(known.on_meta(target, args, kwargs, reads_tensors=True))


def _to_meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    """A traced value as a meta tensor; one that is sparse or of unknown size stays a fake."""
    if UNKNOWN in plain_shape(value.shape) or value.layout != torch.strided:
        return value
    return _to_meta(value)


def _limit_size(cache: dict[Any, Any]) -> None:
    while len(cache) > 50_000:
        cache.pop(next(iter(cache)))


call_prefix = cached_by_target(name_of_call)
"""The prefix of a call's name, by its target."""


class LocalGraph:
    """A local graph under construction; the rank at ``coordinate`` represents its size class.

    ``turn``: the index in the planning graph of the node that is being lowered, and ``part``, below 1, the progress of a local form that
    communicates in steps. Nodes keep their sum in ``meta["turn"]``, so that the graphs of all size classes can be reordered alike.
    """

    def __init__(self, mesh: Mesh, coordinate: tuple[int, ...], known: Values = NUMBERS) -> None:
        self.mesh, self.coordinate, self.known = mesh, coordinate, known
        self._local_shapes: dict[Hashable, tuple[int, ...]] = {}
        self.graph = fx.Graph()
        self._new = NodeMaker(self.graph)
        self.turn, self.part = 0, 0.0
        self.origin = None
        self._axis_index: dict[int, fx.Node] = {}
        self._offsets: dict[tuple[Any, tuple[int, ...]], fx.Node] = {}
        self._emitted: dict[Hashable, tuple[Any, Recording]] = {}
        self._recorded: list[fx.Node] | None = None
        """The nodes emitted so far, while ``record_or_replay`` records; None otherwise."""

    @property
    def origin(self) -> fx.Node | None:
        """The planning node that is being lowered; emitted nodes inherit its metadata (``INHERITED_META``)."""
        return self._origin

    @origin.setter
    def origin(self, node: fx.Node | None) -> None:
        self._origin = node
        self._kept = {} if node is None else {key: node.meta[key] for key in INHERITED_META if key in node.meta}

    def placeholder(self, name: str, shape: Sequence[int], traced: torch.Tensor) -> fx.Node:
        """An input of local ``shape``; a tensor of unknown size is whole, as ``traced``."""
        node = self.graph.placeholder(name)
        node.meta["val"] = traced if UNKNOWN in shape else self.known.empty(shape, traced.dtype)
        return node

    def finish(self) -> fx.GraphModule:
        """The graph as a module; its values are fake CPU tensors."""
        for node in self.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = self.known.fake(node.meta["val"])
        return lazy_graph_module(self.graph)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call and computes its value on meta tensors at once, so that shapes are known as the graph grows."""
        node = self._new("call_function", target, args, kwargs, call_prefix(target))
        value = self.known.on_meta(target, args, kwargs, reads_tensors=bool(node.all_input_nodes))
        return self._with_meta(node, value)

    def _with_meta(self, node: fx.Node, value: Any) -> fx.Node:
        """Sets the value and inherited metadata of the new ``node``."""
        node.meta.update(self._kept, val=value, turn=self.turn + self.part)
        if self._recorded is not None:
            self._recorded.append(node)
        return node

    def record_or_replay(self, key: Hashable, objects: Any, operands: Sequence[fx.Node], make: Callable[[], Any]) -> Any:
        """The result of ``make``, which emits nodes and returns nodes or tuples of them; for a known key, its recorded nodes are replayed.

        The result must depend only on ``key``, which may hold ids of ``objects``, and on shapes, strides and dtypes of the ``operands``.
        """
        same = tuple(map(operands.index, operands)) if len(set(operands)) < len(operands) else None
        place = key, same, *(self.known.tensor_key(n.meta["val"]) for n in operands)
        found = self._emitted.get(place)
        if found is not None:
            return found[1].replay(operands, self._replayed)
        nodes: list[fx.Node] = []
        with self._recording(nodes):
            result = make()
        if {*self._axis_index.values(), *self._offsets.values()}.isdisjoint(operands):  # nodes shared by several calls
            self._emitted[place] = objects, Recording.of(operands, nodes, result)
        return result

    def next_part(self) -> None:
        """What is emitted from now on belongs to a later step of the local form."""
        self.part += SMALLEST_PART
        assert self.part < 1, "too many steps"

    def _replayed(self, target: Any, args: Any, kwargs: Any, value: Any, part: float) -> fx.Node:
        self.part = part
        return self._with_meta(self._new("call_function", target, args, kwargs, call_prefix(target)), value)

    @contextlib.contextmanager
    def _recording(self, nodes: list[fx.Node] | None) -> Iterator[None]:
        before, self._recorded = self._recorded, nodes
        try:
            yield
        finally:
            self._recorded = before

    def copied(self, origin: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Copies the planning node ``origin`` unchanged, on whole tensors, with its traced value."""
        node = self.graph.call_function(origin.target, args, kwargs)
        node.meta = {k: v for k, v in origin.meta.items() if k in (*INHERITED_META, "unbacked_bindings")}
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, _on_meta, origin.meta.get("val"))
        node.meta["turn"] = self.turn
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        made = self._new("call_function", operator.getitem, (node, index), {}, call_prefix(operator.getitem))
        return self._with_meta(made, node.meta["val"][index])

    def axis_index(self, axis: int) -> fx.Node:
        """The rank's index on a mesh axis: a run-time int64 scalar, one node per axis."""
        if axis not in self._axis_index:
            self._axis_index[axis] = self._at_top(torch.ops.fxshard.axis_index.default, self.mesh.axis_names[axis])
        return self._axis_index[axis]

    def offset(self, size: int, axes: tuple[int, ...]) -> fx.Node | int:
        """Global index at which this rank's piece starts if a dim of ``size`` is cut over ``axes``; 0 if it is not cut."""
        if not axes:
            return 0
        key = (plain(size), axes)
        if key not in self._offsets:
            total: Any = None
            with self._recording(None):
                for axis in axes:
                    start = self.start(size, axis)
                    total = start if total is None else self.emit(aten.add.Tensor, total, start)
                    size = chunk(size, self.mesh.shape[axis], self.coordinate[axis])[1]
            self._offsets[key] = total
        return self._offsets[key]

    def start(self, size: int, axis: int) -> fx.Node:
        """Start of this rank's chunk if ``size`` elements are cut over one axis: min(index * ceil(size / n), size)."""
        step = -(-size // self.mesh.shape[axis])
        scaled = self.emit(aten.mul.Tensor, self.axis_index(axis), step)
        if surely(step * (self.mesh.shape[axis] - 1) <= size):
            return scaled
        return self.emit(aten.clamp_max.default, scaled, size)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return plain_shape(node.meta["val"].shape)

    def local_shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's shard; symbolic ones are cached."""
        if are_numbers(shape):
            return local_shape(shape, layout, self.mesh.shape, self.coordinate)
        key = tuple(map(plain, shape)), layout
        if key not in self._local_shapes:
            self._local_shapes[key] = local_shape(shape, layout, self.mesh.shape, self.coordinate)
        return self._local_shapes[key]

    def part_lengths(self, layout: Layout, dim: int) -> tuple[int, ...]:
        """This rank's lengths of the parts of a packed dim; () if ``layout`` does not pack it."""
        packed = layout.packed_on(dim)
        if packed is None:
            return ()
        axis, placement = packed
        return tuple(length for _, length in packed_chunks(placement.parts, self.mesh.shape[axis], self.coordinate[axis]))

    def _at_top(self, target: Any, *args: Any) -> fx.Node:
        """Emits right after the placeholders, so that every later node may use it."""
        behind = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        origin, self.origin = self.origin, None
        with self._recording(None), contextlib.nullcontext() if behind is None else self.graph.inserting_before(behind):
            node = self.emit(target, *args)
        self.origin = origin
        return node
