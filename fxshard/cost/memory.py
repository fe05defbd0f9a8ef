"""Memory of a graph over time, from the liveness of its storages.

A storage lives from the node that makes it to the last user of it or of a view of it; results live to the end, inputs
throughout. FX runs graphs that way if each value is freed after its last user. Temporary buffers inside kernels and the rounding of the
device's allocator are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import storage_key
from fxshard._torch_compat.sizes.symbols import evaluated, expression, hint_of
from fxshard.cost.liveness import HOST, BoundaryValue, Liveness
from fxshard.graph.planning_graph import plain_shape, source_line
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from fxshard.program.sharded_program import is_collective, is_wait


@dataclass(frozen=True)
class Stage:
    """One of several graphs that run in sequence, each taking the results of those before. Values have tensors in ``meta["val"]``; views
    share their storage.

    ``inputs``: placeholders whose values come from the caller; ``results``: nodes whose values go back to it. Both live to the end.
    """

    graph: fx.Graph
    inputs: Mapping[fx.Node, BoundaryValue]
    results: Mapping[fx.Node, BoundaryValue]


def profile_stages(
    stages: Sequence[Stage], static: Mapping[str, int] | None = None, values: Mapping[sympy.Symbol, Any] | None = None
) -> MemoryProfile:
    """The memory profile of ``stages``, run in sequence; ``values``: values of the symbols in sizes."""
    walk = _Walk(values or {})
    for stage in stages:
        walk.run(stage)
    return walk.lives.profile(static or {})


@dataclass
class _Walk:
    """Walks the nodes; buffers are keyed by storage, so that a view is its base."""

    values: Mapping[sympy.Symbol, Any]
    lives: Liveness = field(default_factory=Liveness)
    away: set[Any] = field(default_factory=set)
    """The storages of inputs on the host, which later stages read too."""

    def run(self, stage: Stage) -> None:
        self.lives.begin_stage({storage_key(t) for n in stage.graph.nodes if n.op == "placeholder" for t in _tensors(n.meta.get("val"))})
        for node in stage.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._given(node, stage)
            elif node.op != "output":
                self._step(node)
        for node, end in stage.results.items():
            for tensor in _tensors(node.meta.get("val")):
                self.lives.mark_result(storage_key(tensor), end)

    def _given(self, node: fx.Node, stage: Stage) -> None:
        constant = node.op == "get_attr"
        value = getattr(stage.graph.owning_module, str(node.target), None) if constant else node.meta.get("val")
        end = stage.inputs.get(node, BoundaryValue("buffer" if constant else "activation", node.name))
        for tensor in _tensors(value):
            if end.kind == HOST:
                self.away.add(storage_key(tensor))
            elif storage_key(tensor) not in self.away:
                self.lives.add_input(storage_key(tensor), replace(self._held(tensor, node, end.kind), name=end.name, layout=end.layout))

    def _step(self, node: fx.Node) -> None:
        self.lives.step(StepRun(node.name, str(node.target), source_line(node) or ""))
        read = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
        for tensor in read:
            self.lives.read(storage_key(tensor))
        for tensor in _tensors(node.meta.get("val")):
            key = storage_key(tensor)
            if key in self.lives:
                self.lives.read(key)
            elif is_wait(node):  # it returns the collective's buffer, though its fake tensor has another storage
                self.lives.alias(key, storage_key(read[0]))
            else:
                self.lives.make(key, self._held(tensor, node, "gathered" if is_collective(node) else "temporary"))

    def _held(self, tensor: torch.Tensor, node: fx.Node, kind: str) -> HeldTensor:
        shape, size = plain_shape(tensor.shape), storage_bytes(tensor)
        if self.values and isinstance(size, torch.SymInt):
            found = evaluated(expression(size), self.values)
            size = found if isinstance(found, int) else hint_of(size)
        return HeldTensor(node.name, kind, size, shape, str(tensor.dtype), 0, 0, "", source_line(node) or "")


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage of a tensor, real or fake; UNKNOWN if the size depends on data."""
    return plain_shape((tensor.untyped_storage().nbytes(),))[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in a node's value; only these have a storage."""
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided)
