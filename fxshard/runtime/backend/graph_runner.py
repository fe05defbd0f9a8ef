"""GraphRunner: a compiled program of a Dynamo graph; takes the user's tensors and returns the graph's outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from fxshard._torch_compat.calls import DENSE, overlap
from fxshard.errors import RunError
from fxshard.runtime.backend.graph_outputs import Output
from fxshard.runtime.backend.graph_requests import NamedTensors
from fxshard.runtime.calls.inputs import global_result, reader, write_back
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.ranks.compared_fields import SeedWatch, draw_seed
from fxshard.shapes import evaluate_all


class GraphRunner:
    """``named``: the graph's tensors in the first call, in order; ``distributed``: for each of ``outputs`` whether the user gets a DTensor.

    ``passes_inputs_through``: whether the program reads all of the tensors, in order and replicated, so that plain ones need no
    conversion.
    """

    def __init__(
        self, compiled: CompiledProgram, named: NamedTensors, outputs: Sequence[Output], distributed: Sequence[bool], timeout: float
    ) -> None:
        self.compiled, self.bound, self.program = compiled, compiled.bound, compiled.program
        program = self.program
        self.seed_watch = SeedWatch(self.bound.device_mesh, timeout)
        self.outputs, self.distributed = tuple(outputs), tuple(distributed)
        self.bases = {output.of_output for output in self.outputs if output.of_output is not None}
        self.leaf_of = {name: i for i, name in enumerate(named)}
        self.sizes = [(self.leaf_of[one.places[0][0]], one.places[0][1], one.unit) for one in program.sizes]
        pairs = zip(program.inputs, program.input_layouts, strict=True)
        ends = [(end, layout) for end, layout in pairs if end.kind != "tangent"]
        self.readers = [(self.leaf_of.get(end.name), reader(layout, self.bound, end.name)) for end, layout in ends]
        self.names, kinds = list(named), {end.name: end.kind for end, _ in ends}
        self.written = [self.leaf_of[end.name] for end in program.outputs if end.kind == "mutation"]
        self.arguments = [i for i, name in enumerate(self.names) if kinds.get(name) == "input"]
        self.first_call = True
        self.seeds = [i for i, (place, _) in enumerate(self.readers) if place is None]
        in_order = [place for place, _ in self.readers] == list(range(len(named)))
        whole = all(layout.is_replicated for _, layout in ends)
        here = all(x.device == self.bound.device for x in named.values())  # the same in later calls, because Dynamo guards devices
        self.passes_inputs_through = in_order and whole and here
        returned = zip(program.outputs, program.output_layouts, program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in returned if end.kind != "gradient"]
        self.as_computed = (
            all(end.kind != "mutation" and layout.is_replicated for end, layout, _ in self.results)
            and all(output.computed for output in self.outputs)
            and not any(self.distributed)
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        if self.written:
            self._check_no_overlap(tensors)
        sizes = [tensors[i].shape[dim] // unit for i, dim, unit in self.sizes] if self.sizes else ()
        values = self.compiled(
            tensors if self.passes_inputs_through and DENSE.issuperset(map(type, tensors)) else self._read(tensors), sizes
        )
        return values if self.as_computed else self._outputs(tensors, values)

    def with_outputs(self, outputs: Sequence[Output]) -> GraphRunner:
        """The same program with other ``outputs``: at other sizes its views have other shapes and strides."""
        other = copy.copy(self)
        other.outputs = tuple(outputs)
        return other

    def sizes_of(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The dynamic sizes of a call by name."""
        return {one.name: leaves[i].shape[dim] for one, (i, dim, _) in zip(self.program.sizes, self.sizes, strict=True)}

    def _check_no_overlap(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises RunError if a mutated tensor shares memory with another input: the program would read the old value of that.

        After the first call, checks arguments only: parameters and buffers stay where they are.
        """
        for i in self.written if self.first_call else [i for i in self.written if i in self.arguments]:
            for k in range(len(tensors)) if self.first_call else self.arguments:
                if k != i and overlap(tensors[i], tensors[k]):
                    what = f"{self.names[i]} is changed in place, and {self.names[k]} shares memory with it"
                    raise RunError(what, remedy="pass a clone of one of them, or return the new value instead of writing it")
        self.first_call = False

    def _read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = [draw_seed() if i is None else read(tensors[i]) for i, read in self.readers]
        if self.seeds:
            self.seed_watch([inputs[i] for i in self.seeds])
        return inputs

    def _outputs(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[Any]:
        outputs = [o.value for o in self.outputs]
        computed = iter([i for i, output in enumerate(self.outputs) if output.computed])
        sizes = self.program.values(self.sizes_of(tensors)) if self.sizes else {}
        for (end, layout, shape), value in zip(self.results, values, strict=True):
            shape = evaluate_all(shape, sizes)
            if end.kind == "mutation":
                write_back(tensors[self.leaf_of[end.name]], value, layout, shape, self.bound)
            else:
                i = next(computed)
                outputs[i] = global_result(value, layout, shape, self.bound, self.distributed[i])
        for i in self.bases:
            outputs[i] = outputs[i].contiguous()
        for i, output in enumerate(self.outputs):
            if output.of_input is not None:
                outputs[i] = output.view.of(tensors[output.of_input])
            elif output.of_output is not None:
                outputs[i] = output.view.of(outputs[output.of_output])
        return outputs
