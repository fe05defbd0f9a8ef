"""Runner: one compiled program with the places that its inputs come from and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import pytree
from fxshard.layout import Layout
from fxshard.planning_graph import GraphInput
from fxshard.runtime.agreement import TIMEOUT
from fxshard.runtime.compile import CompiledProgram
from fxshard.runtime.fields import Fields, SeedWatch, value_field
from fxshard.runtime.inputs import check_whole, global_result, local_input, write_back
from fxshard.runtime.launch import compare, mesh_ranks
from fxshard.runtime.values import check_memory

Read = Callable[[Sequence[Any]], torch.Tensor]
"""The leaves of the user's arguments -> a tensor that the compiled program takes."""


class Runner:
    """Calls a compiled program with a module's parameters and a user's arguments.

    ``names`` are those of the leaves of the arguments (``args[0]``). The first call waits, up to ``timeout`` seconds, for
    all ranks to have compiled, and compares what they must hold alike: plain inputs. Seeds of random operators are compared now and then.
    """

    def __init__(self, model: nn.Module, compiled: CompiledProgram, names: Sequence[str], timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.model, self.compiled, self.bound, self.program = model, compiled, compiled.bound, compiled.program
        self.leaf_of = {name: i for i, name in enumerate(names)}
        ends = zip(self.program.inputs, self.program.input_layouts, strict=True)
        self.reads = [self._read(end, layout) for end, layout in ends if end.kind != "tangent"]
        outputs = zip(self.program.outputs, self.program.output_layouts, self.program.output_shapes, strict=True)
        self.results = [(end, layout, shape) for end, layout, shape in outputs if end.kind != "gradient"]
        self.fresh = True
        self.seeds = [i for i, end in enumerate(e for e in self.program.inputs if e.kind != "tangent") if end.kind == "seed"]
        self.watch = SeedWatch(self.bound.device_mesh, timeout)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self.fresh:
            check_whole(self.program, {name: leaves[i] for name, i in self.leaf_of.items()})
            self._check_memory()
        inputs = [read(leaves) for read in self.reads]
        if self.fresh:
            self._check_first(leaves)
        self.watch([inputs[i] for i in self.seeds])
        distributed = any(isinstance(x, DTensor) for x in leaves)
        outputs = []
        for (end, layout, shape), value in zip(self.results, self.compiled(inputs), strict=True):
            if end.kind == "output":
                outputs.append(global_result(value, layout, shape, self.bound, distributed))
            else:
                write_back(self._target(end.name, leaves), value, layout, shape, self.bound)
        return pytree.tree_unflatten(outputs, self.program.out_spec)

    def _read(self, end: GraphInput, layout: Layout) -> Read:
        if end.kind == "seed":
            return lambda leaves: torch.randint(0, 2**62, (), dtype=torch.int64)
        if end.kind == "input":
            index = self.leaf_of[end.name]
            return lambda leaves: local_input(leaves[index], layout, self.bound, end.name)
        owner, key = self._place(end.name)
        if end.kind == "parameter":
            return lambda leaves: getattr(owner, key)
        return lambda leaves: local_input(getattr(owner, key), layout, self.bound, end.name)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, key = name.rpartition(".")
        return self.model.get_submodule(owner), key

    def _target(self, name: str, leaves: Sequence[Any]) -> torch.Tensor:
        if name in self.leaf_of:
            return leaves[self.leaf_of[name]]
        owner, key = self._place(name)
        return getattr(owner, key)

    def _check_memory(self) -> None:
        """Raises RunError for a parameter or buffer that is on meta still."""
        for end in self.program.inputs:
            if end.kind in ("parameter", "buffer"):
                check_memory(end.kind, end.name, self._target(end.name, ()))

    def _check_first(self, leaves: Sequence[Any]) -> None:
        """Raises RunError on all ranks unless they hold the same global values."""
        fields: Fields = {}
        for end in self.program.inputs:
            if end.kind == "input":
                fields |= value_field(end.name, leaves[self.leaf_of[end.name]])
        compare(fields, ranks=mesh_ranks(self.bound.device_mesh), timeout=self.timeout)
        self.fresh = False
