"""Runs a compiled program on the inputs of a Dynamo graph: the user's tensors in, what the user expects out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxshard.runtime.compile import CompiledProgram
from fxshard.runtime.inputs import global_result, local_input, write_back


class GraphRunner:
    """``names``: of the graph's tensors, in order; ``constants``: the outputs that are no tensors, None for the others;
    ``distributed``: for each output whether the user gets a DTensor."""

    def __init__(self, compiled: CompiledProgram, names: Sequence[str], constants: Sequence[Any], distributed: Sequence[bool]) -> None:
        self.compiled, self.bound, program = compiled, compiled.bound, compiled.program
        self.constants, self.distributed = tuple(constants), tuple(distributed)
        self.place = {name: i for i, name in enumerate(names)}
        ends = zip(program.inputs, program.input_layouts, strict=True)
        self.reads = [(end.name, self.place.get(end.name), layout) for end, layout in ends if end.kind != "tangent"]
        outputs = zip(program.outputs, program.output_layouts, program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in outputs if end.kind != "gradient"]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        inputs = [
            local_input(tensors[i], layout, self.bound, name) if i is not None else torch.randint(0, 2**62, (), dtype=torch.int64)
            for name, i, layout in self.reads
        ]
        with _plain_arithmetic(self.bound.device.type):
            values = self.compiled(inputs)
        return self._outputs(tensors, values)

    def _outputs(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[Any]:
        positions = iter([i for i, constant in enumerate(self.constants) if constant is None])
        outputs = list(self.constants)
        for (end, layout, shape), value in zip(self.results, values, strict=True):
            if end.kind == "mutation":
                write_back(tensors[self.place[end.name]], value, layout, shape, self.bound)
            else:
                i = next(positions)
                outputs[i] = global_result(value, layout, shape, self.bound, self.distributed[i])
        return outputs


@contextlib.contextmanager
def _plain_arithmetic(device: str) -> Iterator[None]:
    """Without autocast: its casts are in the graph already."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield
