"""The runner of a Dynamo graph's program: takes all of the graph's tensors, parameters too, and returns the graph's outputs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.calls import overlap
from fxshard.errors import RunError
from fxshard.runtime.backend.dtensors.local_parts import dtensor_of_terms
from fxshard.runtime.backend.graph_outputs import Output
from fxshard.runtime.backend.graph_requests import NamedTensors
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.compile.compiled import CompiledProgram


def graph_runner(
    compiled: CompiledProgram,
    named: NamedTensors,
    outputs: Sequence[Output],
    distributed: Sequence[bool],
    timeout: float,
    local: Collection[str] = (),
    shown: Mapping[str, Sequence[Placement | None]] | None = None,
) -> Runner:
    """``named``: the graph's tensors in the first call, in order; ``distributed``: for each output, whether it may be sharded;
    ``local``: names of those of which the user gets the shard, not a DTensor; ``shown``: as of ``Runner``.

    A call that mutates a tensor raises RunError if another input shares memory with it. After the first call, only arguments are checked:
    parameters and buffers stay where they are.
    """
    program, names = compiled.program, list(named)
    written = [names.index(end.name) for end in program.outputs if end.kind == "mutation"]
    arguments = [names.index(end.name) for end in program.inputs if end.kind == "input"]
    again = [i for i in written if i in arguments]
    return Runner(
        compiled,
        names,
        timeout=timeout,
        distributed=[one for one, output in zip(distributed, outputs, strict=True) if output.computed],
        local=local,
        shown=shown or {},
        finish=GraphOutputs(tuple(outputs), compiled.bound.device_mesh),
        first_check=NoOverlap(written, range(len(names))) if written else None,
        later_check=NoOverlap(again, arguments) if again else None,
        here=all(x.device == compiled.bound.device for x in named.values()),  # the same in later calls, because Dynamo guards devices
    )


def with_outputs(runner: Runner, outputs: Sequence[Output]) -> Runner:
    """The same program with other ``outputs``: at other sizes its views have other shapes and strides."""
    other = copy.copy(runner)
    other.finish = GraphOutputs(tuple(outputs), runner.bound.device_mesh)
    return other


@dataclass(frozen=True)
class GraphOutputs:
    """Makes the outputs of a graph from those that its program computes: views of inputs and of outputs, and Python values."""

    outputs: tuple[Output, ...]
    mesh: DeviceMesh

    @cached_property
    def bases(self) -> frozenset[int]:
        """The outputs of which others are views."""
        return frozenset(output.of_output for output in self.outputs if output.of_output is not None)

    @cached_property
    def as_computed(self) -> bool:
        return all(output.computed and not output.row for output in self.outputs)

    def __call__(self, tensors: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> Sequence[Any]:
        if self.as_computed:
            return computed
        values = iter(computed)
        found = [next(values) if output.computed else output.value for output in self.outputs]
        found = [value.squeeze(0) if output.row else value for value, output in zip(found, self.outputs, strict=True)]
        every = zip(found, self.outputs, strict=True)
        found = [value if output.terms is None else dtensor_of_terms(value, self.mesh, output.terms) for value, output in every]
        for i in self.bases:
            found[i] = found[i].contiguous()
        for i, output in enumerate(self.outputs):
            if output.of_input is not None:
                found[i] = output.view.of(tensors[output.of_input])
            elif output.of_output is not None:
                found[i] = output.view.of(found[output.of_output])
        return found


@dataclass(frozen=True)
class NoOverlap:
    """Checks that none of the tensors ``written`` shares memory with one of ``others``: the program would read the old value of that."""

    written: Sequence[int]
    others: Sequence[int]

    def __call__(self, runner: Runner, tensors: Sequence[torch.Tensor]) -> None:
        for i in self.written:
            for k in self.others:
                if k != i and overlap(tensors[i], tensors[k]):
                    what = f"{runner.names[i]} is changed in place, and {runner.names[k]} shares memory with it"
                    raise RunError(what, remedy="pass a clone of one of them, or return the new value instead of writing it")
