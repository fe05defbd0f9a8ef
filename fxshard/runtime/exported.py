"""ExportedProgram: a program with its weights, as ``fxshard.export`` makes it and ``fxshard.load`` reads it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard import archive
from fxshard._torch_compat import pytree
from fxshard.errors import OptionError, RunError, a_kind
from fxshard.layout import Layout
from fxshard.objects import open_call
from fxshard.program import ShardedProgram
from fxshard.runtime.agreement import TIMEOUT
from fxshard.runtime.bind import BoundProgram, bind
from fxshard.runtime.compile import COMPILERS, CompiledProgram, compile_program
from fxshard.runtime.fields import debug_field, mesh_fields, shape_fields, weight_fields
from fxshard.runtime.inputs import Leaves, leaf_names
from fxshard.runtime.launch import compare, mesh_ranks, versions
from fxshard.runtime.options import check_choice, check_device_mesh, check_flag, check_number
from fxshard.runtime.parameters import planned_layouts, shard_parameters
from fxshard.runtime.runner import Runner
from fxshard.runtime.values import argument_values, check_arguments, check_value


@dataclass(frozen=True)
class ExportedProgram(ShardedProgram):
    """``weights``: whole parameters and buffers by the model's names, empty where the program carries none."""

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, program: ShardedProgram, weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
        return cls(**{f.name: getattr(program, f.name) for f in fields(ShardedProgram)}, weights=weights)

    def save(self, path: str | Path) -> None:
        """Writes one file for all ranks (``.pt2``), atomically; weights on meta are left out. Raises FileError."""
        stored = bool(self.weights) and not any(w.is_meta for w in self.weights.values())
        archive.save(self, path, self.weights if stored else None)

    @classmethod
    def load(cls, path: str | Path) -> ExportedProgram:
        """Reads a program and its weights, if it has any; needs no process group. Raises FileError."""
        program = archive.load(path)
        weights = archive.load_weights(path) if archive.has_weights(path) else {}
        return cls.of(program, weights)

    def bind(
        self,
        device_mesh: DeviceMesh,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        compiler: str = "inductor",
        device: torch.device | str | None = None,
        timeout: float = TIMEOUT,
        debug: bool = False,
    ) -> BoundModule:
        """The program as a module for this rank, compiled; every rank of the mesh calls this.

        Args:
            weights: whole tensors by the model's names; the program's own by default.
            compiler: ``"inductor"`` or ``"eager"``.
            timeout: seconds to wait for other ranks, here and in each collective.
            debug: whether ranks compare each collective before it is issued (docs/faults.md).

        Raises PlanError for another mesh, RunError for a missing weight, or ranks that hold different programs or weights.
        """
        check_device_mesh(device_mesh)
        if not isinstance(weights, Mapping | None):
            remedy = "pass whole tensors by the model's names, such as a state_dict"
            raise OptionError(f"weights are {a_kind(weights)}", remedy=remedy)
        check_choice("compiler", compiler, COMPILERS)
        values = dict(weights or self.weights)
        check_number("timeout", timeout, optional=False)
        check_flag("debug", debug)
        fields_ = {**versions(), **mesh_fields(device_mesh), "plan": self.plan.hash, "program": self.hash}
        compare({**fields_, **weight_fields(values), **debug_field(debug)}, ranks=mesh_ranks(device_mesh), timeout=timeout)
        bound = bind(self, device_mesh, device)
        return BoundModule(self, values, bound, partial(compile_program, compiler=compiler, timeout=timeout, debug=debug))


class BoundModule(nn.Module):
    """A program on this rank: called like the model; its parameters are DTensors under the model's names."""

    def __init__(
        self,
        program: ExportedProgram,
        weights: Mapping[str, torch.Tensor],
        bound: BoundProgram,
        compiled: Callable[[BoundProgram], CompiledProgram],
    ) -> None:
        super().__init__()
        self._program = program
        _hold(self, program, weights)
        shard_parameters(self, planned_layouts(program), bound.device_mesh, bound.device)
        shapes = zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True)
        self._takes = {end.name: (shape, dtype) for end, shape, dtype in shapes if end.kind == "input"}
        self._compiled = compiled(bound)
        self._ranks, self._timeout = mesh_ranks(bound.device_mesh), self._compiled.watchdog.timeout
        self._runners: dict[tuple[tuple[str, bool], ...], Runner] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program; plain tensors are global values.

        Raises RunError for arguments unlike the traced ones, PlanError for plain arguments where outputs are not whole.
        """
        args, kwargs, objects = open_call(args, kwargs)
        names, leaves = leaf_names(args, kwargs), Leaves(pytree.tree_leaves((args, kwargs)))
        leaves.objects = objects
        key = tuple((name, isinstance(leaf, DTensor)) for name, leaf in zip(names, leaves, strict=True))
        if not self._runners:
            compare(shape_fields(argument_values(args, kwargs)), ranks=self._ranks, timeout=self._timeout)
        self._check(args, kwargs)
        if key not in self._runners:
            self._runners[key] = Runner(self, self._compiled, names, self._timeout)
        return self._runners[key](leaves)

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        check_arguments(self._program, args, kwargs)
        given = argument_values(args, kwargs)
        for name, (shape, dtype) in self._takes.items():
            check_value(name, given[name], shape, dtype)

    def layouts(self) -> dict[str, Layout]:
        """Layout of each parameter on the mesh."""
        return {name: Layout(p.placements) for name, p in self.named_parameters() if isinstance(p, DTensor)}


def _hold(root: nn.Module, program: ShardedProgram, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives ``root`` the program's parameters and buffers under their names, submodules made as needed."""
    for end, shape, dtype in zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True):
        if end.kind not in ("parameter", "buffer"):
            continue
        if end.name not in weights:
            raise RunError(f"no weight {end.name!r}", remedy="pass weights=, whole tensors by the model's names")
        value = weights[end.name].detach()
        check_value(end.name, value, shape, dtype)
        *path, key = end.name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if end.kind == "parameter":
            owner.register_parameter(key, nn.Parameter(value, requires_grad=False))
        else:
            owner.register_buffer(key, value.clone())
