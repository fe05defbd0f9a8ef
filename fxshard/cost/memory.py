"""Memory over time: which storages the steps of a graph make, how long each lives, and how many bytes that is.

A storage lives from the node that makes it to the last one that reads it or a view of it, results to the end, inputs all the
time. This is how fx runs a graph that frees each value after its last reader. What a kernel allocates for itself while it runs is not
in a graph, nor what a device's allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import pytree, storage_key
from fxshard.errors import OptionError, closest
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from fxshard.planning_graph import UNKNOWN, plain_shape, source_line
from fxshard.program import is_collective, is_wait

OPTIMIZERS: Mapping[str, int] = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2}
"""Optimisers by the tensors that each keeps for a parameter, of the parameter's size (AdamW is as Adam)."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimiser keeps: ``kind`` of ``OPTIMIZERS``; its state in ``state_dtype`` (None: the parameter's); with
    ``master_weights`` a copy in float32 of each parameter that is of another dtype."""

    kind: str = "none"
    state_dtype: torch.dtype | None = None
    master_weights: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            what = f"unknown optimizer {self.kind!r}{closest(self.kind, OPTIMIZERS)}"
            raise OptionError(what, remedy=f"use one of {', '.join(OPTIMIZERS)}")

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """Bytes of state for each element of a parameter of ``dtype``."""
        master = 4 if self.master_weights and dtype != torch.float32 else 0
        return OPTIMIZERS[self.kind] * (self.state_dtype or dtype).itemsize + master


@dataclass(frozen=True)
class End:
    """What a placeholder or a result of a graph is: ``kind`` as in ``memory_profile.KINDS``, the user's name, its layout."""

    kind: str
    name: str
    layout: str = ""


@dataclass(frozen=True)
class Stage:
    """A graph that runs after the ones before it and takes over what they return; values have tensors in ``meta["val"]``, views
    sharing their storage.

    ``inputs``: placeholders that come from outside, ``results``: what is returned to it, by node; both stay to the end.
    """

    graph: fx.Graph
    inputs: Mapping[fx.Node, End]
    results: Mapping[fx.Node, End]


def profile_stages(stages: Sequence[Stage], static: Mapping[str, int] | None = None) -> MemoryProfile:
    """What is alive over the steps of ``stages``, run one after another."""
    walk = _Walk()
    for number, stage in enumerate(stages):
        walk.run(number, stage)
    return walk.finish(static or {})


@dataclass
class _Life:
    """A storage while its life is being found out."""

    name: str
    value: torch.Tensor
    bytes: int
    birth: int
    stage: int
    death: int
    last_stage: int
    end: End | None = None
    gathered: bool = False
    source: str = ""


@dataclass
class _Walk:
    """Goes through the steps and notes who makes and who reads each storage."""

    all: list[_Life] = field(default_factory=list)
    lives: dict[int, _Life] = field(default_factory=dict)
    """The storages that the present stage knows."""
    same: dict[int, int] = field(default_factory=dict)
    """Storages that are another one: what is waited for is what the collective gave."""
    steps: list[StepRun] = field(default_factory=list)

    def run(self, number: int, stage: Stage) -> None:
        self._begin(stage)
        for node in stage.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._given(node, number, stage)
            elif node.op != "output":
                self._step(node, number)
        for node, end in stage.results.items():
            for tensor in _tensors(node.meta.get("val")):
                life = self.lives[self._key(tensor)]
                life.end = life.end or end

    def _begin(self, stage: Stage) -> None:
        """Of the storages so far it knows those that it is handed: what it computes again is made anew."""
        handed = {self._key(t) for n in stage.graph.nodes if n.op == "placeholder" for t in _tensors(n.meta.get("val"))}
        self.lives = {key: life for key, life in self.lives.items() if key in handed}

    def _given(self, node: fx.Node, number: int, stage: Stage) -> None:
        value = node.meta.get("val") if node.op == "placeholder" else getattr(stage.graph.owning_module, str(node.target), None)
        end = stage.inputs.get(node, End("buffer", node.name) if node.op == "get_attr" else None)
        for tensor in _tensors(value):
            if self._key(tensor) not in self.lives:
                self._make(tensor, node, len(self.steps), number, end)

    def _step(self, node: fx.Node, number: int) -> None:
        at = len(self.steps)
        self.steps.append(StepRun(node.name, str(node.target), source_line(node) or ""))
        read = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
        for tensor in read:
            self._touch(tensor, at, number)
        for tensor in _tensors(node.meta.get("val")):
            if is_wait(node):
                self.same.setdefault(storage_key(tensor), self._key(read[0]))
            if self._key(tensor) in self.lives:
                self._touch(tensor, at, number)
            else:
                self._make(tensor, node, at, number, None)

    def _key(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        while self.same.get(key, key) != key:
            key = self.same[key]
        return key

    def _make(self, tensor: torch.Tensor, node: fx.Node, at: int, number: int, end: End | None) -> None:
        name = node.name if end is None else end.name
        life = _Life(name, tensor, storage_bytes(tensor), at, number, at, number, end, is_collective(node), source_line(node) or "")
        self.lives[self._key(tensor)] = life
        self.all.append(life)

    def _touch(self, tensor: torch.Tensor, at: int, number: int) -> None:
        life = self.lives.get(self._key(tensor))
        if life is not None:
            life.death, life.last_stage = at, number

    def finish(self, static: Mapping[str, int]) -> MemoryProfile:
        last = max(len(self.steps) - 1, 0)
        tensors = tuple(_held(life, last) for life in self.all if life.bytes != UNKNOWN)
        unknown = tuple(life.name for life in self.all if life.bytes == UNKNOWN)
        return MemoryProfile(tensors, tuple(self.steps) or (StepRun("start", ""),), dict(static), unknown)


def _held(life: _Life, last: int) -> HeldTensor:
    kind = life.end.kind if life.end else "activation" if life.last_stage > life.stage else "gathered" if life.gathered else "temporary"
    return HeldTensor(
        name=life.end.name if life.end else life.name,
        kind=kind,
        bytes=life.bytes,
        shape=plain_shape(life.value.shape),
        dtype=str(life.value.dtype),
        birth=life.birth,
        death=last if life.end else life.death,
        layout=life.end.layout if life.end else "",
        source=life.source,
    )


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage of a tensor, real or fake; UNKNOWN where only running tells."""
    size = tensor.untyped_storage().nbytes()
    return plain_shape((size,))[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with a storage in what a node gives."""
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided)
