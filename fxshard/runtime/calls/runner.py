"""Runner: a compiled program of a module, with the sources of its inputs and the destinations of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import held
from fxshard.graph.objects import leaves_in_objects, outcome_spec_of, outputs_in_objects
from fxshard.graph.planning_graph import GraphInput, GraphOutput
from fxshard.layout.layouts import Layout
from fxshard.runtime.calls.inputs import Leaves, check_plain_results, global_result, reader, write_back
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.compared_fields import Fields, SeedWatch, draw_seed, value_field
from fxshard.runtime.ranks.launch import compare, mesh_ranks
from fxshard.runtime.simulate.values import check_has_data
from fxshard.shapes import evaluate_all

Read = Callable[[Sequence[Any]], torch.Tensor]
"""From the leaves of the user's arguments to one input of the compiled program."""


class Runner:
    """Calls a compiled program with a module's parameters and a user's arguments.

    ``names``: those of the leaves of the arguments (``args[0]``). The first call waits, up to ``timeout`` seconds, until all ranks have
    compiled, and checks that plain inputs are equal on all ranks. Seeds of random operators are compared now and then.
    ``requested_outputs``: outputs whose layout the user requested; these, and outputs in objects, are DTensors unless replicated.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: CompiledProgram,
        names: Sequence[str],
        timeout: float = TIMEOUT,
        requested_outputs: Collection[str] = (),
    ) -> None:
        self.timeout, self.requested_outputs = timeout, requested_outputs
        self.model, self.compiled, self.bound, self.program = model, compiled, compiled.bound, compiled.program
        self.leaf_of = {name: i for i, name in enumerate(names)}
        ends = zip(self.program.inputs, self.program.input_layouts, strict=True)
        self.readers = [self._read(end, layout) for end, layout in ends if end.kind != "tangent"]
        outputs = zip(self.program.outputs, self.program.output_layouts, self.program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in outputs if end.kind != "gradient"]
        self.as_computed = all(end.kind == "output" and layout.is_replicated for end, layout, _ in self.results)
        self.in_objects = leaves_in_objects(self.program.in_spec)
        self.paths = outputs_in_objects(self.program.out_spec)
        self.changes_objects = outcome_spec_of(self.program.out_spec) is not None
        self.single_output = self.program.out_spec.is_leaf()
        self.sizes = [(self.leaf_of[one.places[0][0]], one.places[0][1], one.unit) for one in self.program.sizes]
        self.first_call = True
        self.seeds = [i for i, end in enumerate(e for e in self.program.inputs if e.kind != "tangent") if end.kind == "seed"]
        self.seed_watch = SeedWatch(self.bound.device_mesh, timeout)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self.first_call:
            check_plain_results(
                self.program, {name: leaves[i] for name, i in self.leaf_of.items()}, requested_outputs=self.requested_outputs
            )
            self._check_memory()
        inputs = [read(leaves) for read in self.readers]
        if self.first_call:
            self._check_first(leaves)
        if self.seeds:
            self.seed_watch([inputs[i] for i in self.seeds])
        distributed = any(isinstance(x, DTensor) and i not in self.in_objects for i, x in enumerate(leaves))
        sizes = [leaves[i].shape[dim] // unit for i, dim, unit in self.sizes] if self.sizes else ()
        values = self.compiled(inputs, sizes)
        outputs = values if self.as_computed and not distributed else self._outputs(leaves, values, distributed)
        if self.changes_objects:
            objects = leaves.objects if isinstance(leaves, Leaves) else ()
            return pytree.tree_unflatten(outputs, self.program.out_spec).apply(objects, leaves, self.bound.device)
        return outputs[0] if self.single_output else pytree.tree_unflatten(outputs, self.program.out_spec)

    def _outputs(self, leaves: Sequence[Any], values: Sequence[torch.Tensor], distributed: bool) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        for (end, layout, shape), value in zip(self._results_of(leaves), values, strict=True):
            if end.kind == "output":
                is_dtensor = distributed or self._is_dtensor(end.name, layout, leaves)
                outputs.append(global_result(value, layout, shape, self.bound, is_dtensor))
            else:
                write_back(self._target(end.name, leaves), value, layout, shape, self.bound)
        return outputs

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
        return (not layout.is_replicated and (name in self.paths or name in self.requested_outputs)) or (
            place is not None and isinstance(leaves[place], DTensor)
        )

    def _read(self, end: GraphInput, layout: Layout) -> Read:
        if end.kind == "seed":
            return lambda leaves: draw_seed()
        if end.kind == "input":
            index, of_leaf = self.leaf_of[end.name], reader(layout, self.bound, end.name)
            return lambda leaves: of_leaf(leaves[index])
        owner, key = self._owner_and_name(end.name)
        if end.kind == "parameter":
            return lambda leaves: held(owner, key)
        of_buffer = reader(layout, self.bound, end.name)
        return lambda leaves: of_buffer(getattr(owner, key))

    def _owner_and_name(self, name: str) -> tuple[nn.Module, str]:
        owner, _, key = name.rpartition(".")
        return self.model.get_submodule(owner), key

    def _target(self, name: str, leaves: Sequence[Any]) -> torch.Tensor:
        if name in self.leaf_of:
            return leaves[self.leaf_of[name]]
        owner, key = self._owner_and_name(name)
        return getattr(owner, key)

    def _check_memory(self) -> None:
        """Raises RunError for a parameter or buffer that is still on meta."""
        for end in self.program.inputs:
            if end.kind in ("parameter", "buffer"):
                check_has_data(end.kind, end.name, self._target(end.name, ()))

    def _check_first(self, leaves: Sequence[Any]) -> None:
        """Raises RunError on all ranks if a plain input differs among them."""
        fields: Fields = {}
        for end in self.program.inputs:
            if end.kind == "input":
                fields |= value_field(end.name, leaves[self.leaf_of[end.name]])
        compare(fields, ranks=mesh_ranks(self.bound.device_mesh), timeout=self.timeout)
        self.first_call = False
