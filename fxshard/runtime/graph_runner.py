"""Runs a compiled program on the inputs of a Dynamo graph: the user's tensors in, what the user expects out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.runtime.compile import CompiledProgram
from fxshard.runtime.dynamo_graph import Output
from fxshard.runtime.fields import SeedWatch
from fxshard.runtime.inputs import global_result, local_input, write_back


class GraphRunner:
    """``names``: of the graph's tensors, in order; ``distributed``: for each of ``outputs`` whether the user gets a DTensor."""

    def __init__(
        self, compiled: CompiledProgram, names: Sequence[str], outputs: Sequence[Output], distributed: Sequence[bool], timeout: float
    ) -> None:
        self.compiled, self.bound, program = compiled, compiled.bound, compiled.program
        self.watch = SeedWatch(self.bound.device_mesh, timeout)
        self.outputs, self.distributed = tuple(outputs), tuple(distributed)
        self.place = {name: i for i, name in enumerate(names)}
        ends = zip(program.inputs, program.input_layouts, strict=True)
        self.reads = [(end.name, self.place.get(end.name), layout) for end, layout in ends if end.kind != "tangent"]
        returned = zip(program.outputs, program.output_layouts, program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in returned if end.kind != "gradient"]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        inputs = [
            local_input(tensors[i], layout, self.bound, name) if i is not None else torch.randint(0, 2**62, (), dtype=torch.int64)
            for name, i, layout in self.reads
        ]
        self.watch([x for x, (_, i, _) in zip(inputs, self.reads, strict=True) if i is None])
        return self._outputs(tensors, self.compiled(inputs))

    def _outputs(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[Any]:
        outputs = [o.value if o.of_input is None else tensors[o.of_input] for o in self.outputs]
        computed = iter([i for i, output in enumerate(self.outputs) if output.computed])
        for (end, layout, shape), value in zip(self.results, values, strict=True):
            if end.kind == "mutation":
                write_back(tensors[self.place[end.name]], value, layout, shape, self.bound)
            else:
                i = next(computed)
                outputs[i] = global_result(value, layout, shape, self.bound, self.distributed[i])
        return outputs
