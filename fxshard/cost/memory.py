"""Memory over time: which storages the steps of a graph make, how long each lives, and how many bytes that is.

A storage lives from the node that makes it to the last one that reads it or a view of it, results to the end, inputs all the
time. This is how fx runs a graph that frees each value after its last reader. What a kernel allocates for itself while it runs is not
in a graph, nor what a device's allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree, storage_key
from fxshard._torch_compat.symbols import evaluated, expression, hint_of
from fxshard.cost.lives import End, Lives
from fxshard.graph.planning_graph import plain_shape, source_line
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from fxshard.program.sharded_program import is_collective, is_wait


@dataclass(frozen=True)
class Stage:
    """A graph that runs after the ones before it and takes over what they return; values have tensors in ``meta["val"]``, views
    sharing their storage.

    ``inputs``: placeholders that come from outside, ``results``: what is returned to it, by node; both stay to the end.
    """

    graph: fx.Graph
    inputs: Mapping[fx.Node, End]
    results: Mapping[fx.Node, End]


def profile_stages(
    stages: Sequence[Stage], static: Mapping[str, int] | None = None, values: Mapping[sympy.Symbol, Any] | None = None
) -> MemoryProfile:
    """What is alive over the steps of ``stages``, run one after another; ``values``: what symbols in sizes are then."""
    walk = _Walk(values or {})
    for stage in stages:
        walk.run(stage)
    return walk.lives.profile(static or {})


@dataclass
class _Walk:
    """Goes through the steps; pieces are known by their storages, views by those of what they are views of."""

    values: Mapping[sympy.Symbol, Any]
    lives: Lives = field(default_factory=Lives)

    def run(self, stage: Stage) -> None:
        self.lives.begin_stage({storage_key(t) for n in stage.graph.nodes if n.op == "placeholder" for t in _tensors(n.meta.get("val"))})
        for node in stage.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._given(node, stage)
            elif node.op != "output":
                self._step(node)
        for node, end in stage.results.items():
            for tensor in _tensors(node.meta.get("val")):
                self.lives.keep(storage_key(tensor), end)

    def _given(self, node: fx.Node, stage: Stage) -> None:
        constant = node.op == "get_attr"
        value = getattr(stage.graph.owning_module, str(node.target), None) if constant else node.meta.get("val")
        end = stage.inputs.get(node, End("buffer" if constant else "activation", node.name))
        for tensor in _tensors(value):
            self.lives.give(storage_key(tensor), replace(self._held(tensor, node, end.kind), name=end.name, layout=end.layout))

    def _step(self, node: fx.Node) -> None:
        self.lives.step(StepRun(node.name, str(node.target), source_line(node) or ""))
        read = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
        for tensor in read:
            self.lives.read(storage_key(tensor))
        for tensor in _tensors(node.meta.get("val")):
            key = storage_key(tensor)
            if key in self.lives:
                self.lives.read(key)
            elif is_wait(node):  # it gives what the collective gave, though its fake is another
                self.lives.share(key, storage_key(read[0]))
            else:
                self.lives.make(key, self._held(tensor, node, "gathered" if is_collective(node) else "temporary"))

    def _held(self, tensor: torch.Tensor, node: fx.Node, kind: str) -> HeldTensor:
        shape, size = plain_shape(tensor.shape), storage_bytes(tensor)
        if self.values and isinstance(size, torch.SymInt):
            found = evaluated(expression(size), self.values)
            size = found if isinstance(found, int) else hint_of(size)
        return HeldTensor(node.name, kind, size, shape, str(tensor.dtype), 0, 0, "", source_line(node) or "")


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage of a tensor, real or fake; UNKNOWN where only running tells."""
    return plain_shape((tensor.untyped_storage().nbytes(),))[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with a storage in what a node gives."""
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided)
