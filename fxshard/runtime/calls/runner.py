"""Runner: a compiled program with the sources of its inputs and the destinations of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import DENSE, held
from fxshard.graph.objects import call_result_spec, leaves_in_objects, outputs_in_objects
from fxshard.graph.planning_graph import GraphInput, GraphOutput
from fxshard.layout.layouts import Layout
from fxshard.runtime.calls.inputs import Leaves, check_plain_results, global_result, reader, write_back
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.compared_fields import Fields, SeedWatch, draw_seed, value_field
from fxshard.runtime.ranks.launch import compare, mesh_ranks
from fxshard.runtime.simulate.values import check_has_data
from fxshard.shapes import evaluate_all

Check = Callable[["Runner", Sequence[Any]], None]
"""Checks the leaves of a call before it runs; raises for a call that must not run."""
Finish = Callable[[Sequence[Any], Sequence[Any]], Any]
"""From the leaves of a call and the outputs of the program to what the user gets."""


def check_first(runner: Runner, leaves: Sequence[Any]) -> None:
    """Raises PlanError for a plain result that is not replicated, RunError for a tensor without memory.

    Waits, up to the runner's timeout, until all ranks have compiled, and raises RunError on all of them if a plain input differs.
    """
    named = {name: leaves[i] for name, i in runner.leaf_of.items()}
    check_plain_results(runner.program, named, runner.distributed, runner.requested_outputs)
    fields: Fields = {}
    for end in runner.program.inputs:
        if end.kind in ("parameter", "buffer", "input"):
            check_has_data(end.kind, end.name, runner.tensor(end.name, leaves))
        if end.kind == "input":
            fields |= value_field(end.name, named[end.name])
    compare(fields, ranks=mesh_ranks(runner.bound.device_mesh), timeout=runner.timeout)


@dataclass(eq=False)
class Runner:
    """Calls a compiled program with the leaves of a user's arguments.

    ``names``: those of the leaves (``args[0]``). Parameters and buffers that are not among them are read from ``model``.
    ``distributed``: for each output whether it is a DTensor; by default all are if an argument is one, else those whose layout the user
    requested (``requested_outputs``) and those in objects, unless replicated. ``local``: outputs of which the caller gets the rank's
    shard, a plain tensor. ``shown``: output -> the placements that it shows on axes of one rank. ``finish``: by default restores the
    structure of the model's outputs. ``first_check`` runs before the first call, ``later_check`` before all others. ``here``: whether in
    every call all leaves are on the program's device. Seeds of random operators are compared now and then, waiting up to ``timeout``
    seconds.
    """

    compiled: CompiledProgram
    names: Sequence[str]
    model: nn.Module | None = None
    timeout: float = TIMEOUT
    requested_outputs: Collection[str] = ()
    local: Collection[str] = ()
    distributed: Sequence[bool] | None = None
    shown: Mapping[str, Sequence[Placement | None]] = field(default_factory=dict)
    finish: Finish | None = None
    first_check: Check | None = check_first
    later_check: Check | None = None
    here: bool = False

    def __post_init__(self) -> None:
        self.bound, self.program = self.compiled.bound, self.compiled.program
        program, self.check = self.program, self.first_check
        self.leaf_of = {name: i for i, name in enumerate(self.names)}
        self.sizes = [(self.leaf_of[one.places[0][0]], one.places[0][1], one.unit) for one in program.sizes]
        ends = [(end, layout) for end, layout in zip(program.inputs, program.input_layouts, strict=True) if end.kind != "tangent"]
        self.readers = [self._reader(end, layout) for end, layout in ends]
        self.seeds = [i for i, (end, _) in enumerate(ends) if end.kind == "seed"]
        self.seed_watch = SeedWatch(self.bound.device_mesh, self.timeout)
        self.places = [self.leaf_of.get(end.name) for end, _ in ends]
        in_order = self.places == list(range(len(self.names)))
        self.passes_inputs_through = self.here and in_order and all(layout.is_replicated for _, layout in ends)
        results = zip(program.outputs, program.output_layouts, program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in results if end.kind != "gradient"]
        plain = all(end.kind == "output" and self._shown(end.name, layout).is_replicated for end, layout, _ in self.results)
        self.as_computed = plain and not any(self.distributed or ())
        self.in_objects, self.paths = leaves_in_objects(program.in_spec), outputs_in_objects(program.out_spec)
        self.changes_objects, self.single_output = call_result_spec(program.out_spec) is not None, program.out_spec.is_leaf()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self.check is not None:
            self.check(self, leaves)
            self.check = self.later_check
        through = self.passes_inputs_through and DENSE.issuperset(map(type, leaves))
        inputs = leaves if through else [read(leaves) for read in self.readers]
        if self.seeds:
            self.seed_watch([inputs[i] for i in self.seeds])
        sizes = [leaves[i].shape[dim] // unit for i, dim, unit in self.sizes] if self.sizes else ()
        outputs = self._outputs(leaves, self.compiled(inputs, sizes))
        if self.finish is not None:
            return self.finish(leaves, outputs)
        if self.changes_objects:
            objects = leaves.objects if isinstance(leaves, Leaves) else ()
            return pytree.tree_unflatten(outputs, self.program.out_spec).apply(objects, leaves, self.bound.device)
        return outputs[0] if self.single_output else pytree.tree_unflatten(outputs, self.program.out_spec)

    def _outputs(self, leaves: Sequence[Any], values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The global outputs; writes what is mutated back."""
        every = self.distributed is None and any(isinstance(x, DTensor) and i not in self.in_objects for i, x in enumerate(leaves))
        if self.as_computed and not every:
            return values
        outputs: list[torch.Tensor] = []
        for (end, layout, shape), value in zip(self._results_of(leaves), values, strict=True):
            if end.kind != "output":
                write_back(self.tensor(end.name, leaves), value, layout, shape, self.bound)
                continue
            if end.name in self.local:
                outputs.append(value)
                continue
            one = every or (self._is_dtensor(end.name, layout, leaves) if self.distributed is None else self.distributed[len(outputs)])
            outputs.append(global_result(value, self._shown(end.name, layout) if one else layout, shape, self.bound, one))
        return outputs

    def _shown(self, name: str, layout: Layout) -> Layout:
        named = self.shown.get(name, (None,) * len(layout))
        return Layout(own if other is None else other for own, other in zip(layout, named, strict=True))

    def _results_of(self, leaves: Sequence[Any]) -> Sequence[tuple[GraphOutput, Layout, tuple[int, ...]]]:
        """The results with their global shapes in this call."""
        if not self.sizes:
            return self.results
        values = self.program.values(self.sizes_of(leaves))
        return [(end, layout, evaluate_all(shape, values)) for end, layout, shape in self.results]

    def sizes_of(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The dynamic sizes of a call by name."""
        return {one.name: leaves[i].shape[dim] for one, (i, dim, _) in zip(self.program.sizes, self.sizes, strict=True)}

    def _is_dtensor(self, name: str, layout: Layout, leaves: Sequence[Any]) -> bool:
        """Whether an output is a DTensor in a call without DTensor arguments.

        It is one if it replaces a DTensor in an object, or if it is sharded and either belongs to an object or was requested.
        """
        place = self.leaf_of.get(self.paths.get(name, ""))
        whole = self._shown(name, layout).is_replicated
        return (not whole and (name in self.paths or name in self.requested_outputs)) or (
            place is not None and isinstance(leaves[place], DTensor)
        )

    def _reader(self, end: GraphInput, layout: Layout) -> Callable[[Sequence[Any]], torch.Tensor]:
        """A function from the leaves of a call to one input of the program."""
        if end.kind == "seed":
            return lambda leaves: draw_seed()
        read, place = reader(layout, self.bound, end.name), self.leaf_of.get(end.name)
        if place is not None:
            return lambda leaves: read(leaves[place])
        owner, key = self._owner_and_name(end.name)
        if end.kind == "parameter":
            return lambda leaves: held(owner, key)
        return lambda leaves: read(getattr(owner, key))

    def tensor(self, name: str, leaves: Sequence[Any]) -> torch.Tensor:
        """The user's tensor by the name of an input of the program: a leaf of a call, or a parameter or buffer of the model."""
        if name in self.leaf_of:
            return leaves[self.leaf_of[name]]
        owner, key = self._owner_and_name(name)
        return getattr(owner, key)

    def _owner_and_name(self, name: str) -> tuple[nn.Module, str]:
        assert self.model is not None, f"{name} is no leaf, and there is no model"
        owner, _, key = name.rpartition(".")
        return self.model.get_submodule(owner), key
