"""Measures the memory of a program: runs one rank and tracks its storages or its allocator.

The rank runs alone: its collectives return what they would if all ranks held equal data, in new tensors as on a real mesh.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxshard._torch_compat import TorchDispatchMode
from fxshard._torch_compat.fakes import storage_key
from fxshard.cost.recorder import MemoryRecorder
from fxshard.errors import OptionError, RunError, a_kind
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.options import check_choice
from fxshard.runtime.compile.compile import COMPILERS, compile_program
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.rank_graph.fake_ranks import fake_ranks
from fxshard.runtime.rank_graph.memory import unbound
from fxshard.runtime.simulate.shards import scatter
from fxshard.runtime.simulate.values import check_has_data, check_value

UNCHECKED = re.compile(r"(adaptive_|fractional_)?max_pool[23]d(_with_indices)?_backward")
"""Kernels of torch that write wherever their indices say."""


class SingleRankCollectives(TorchDispatchMode):
    """Collectives without other ranks: each returns what it would if all ranks of its group held equal data.

    Indices would then be those of another rank's shard: kernels that do not check them get zeros, in place, since only memory counts.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) != "_c10d_functional":
            if UNCHECKED.fullmatch(func.overloadpacket.__name__):
                for x in (one for one in args if isinstance(one, torch.Tensor) and not one.dtype.is_floating_point):
                    x.zero_()
            return func(*args, **(kwargs or {}))
        name, x = func.overloadpacket.__name__, args[0]
        if name in ("wait_tensor", "all_reduce_"):
            return x
        out = (kwargs or {}).get("out")
        if name.startswith("all_gather"):
            out = x.new_empty((args[1] * x.shape[0], *x.shape[1:])) if out is None else out
            out.view(args[1], *x.shape).copy_(x)
            return out
        piece = x.chunk(args[2])[0] if name.startswith("reduce_scatter") else x
        return piece.clone() if out is None else out.copy_(piece)


@dataclass(frozen=True)
class MeasuredMemory:
    """Peak bytes of a rank; ``at``: the operator that ran then, empty if the allocator was tracked."""

    peak: int
    at: str = ""


def measure_memory(program: ShardedProgram, values: Sequence[torch.Tensor], coordinate: tuple[int, ...] | None = None) -> MeasuredMemory:
    """Runs the rank at ``coordinate`` as eager aten on the CPU and tracks its storages; ``values`` as for ``simulate_program``.

    Inductor's allocations bypass the dispatcher; ``measure_allocated`` sees them. Raises OptionError for anything but a program and a rank
    of its mesh, RunError for unsuitable values.
    """
    check_values(program, values, coordinate)
    rank = _Rank.of(program, values, unbound(program, coordinate), "eager")
    recorder = MemoryRecorder(rank.inputs)
    with SingleRankCollectives(), recorder:
        rank.step()
    return MeasuredMemory(recorder.peak, recorder.peak_op)


def measure_allocated(
    program: ShardedProgram, values: Sequence[torch.Tensor], coordinate: tuple[int, ...] | None = None, compiler: str = "inductor"
) -> MeasuredMemory:
    """As ``measure_memory``, but from the CPU allocator's records in torch's profiler, which include memory inside kernels.

    Inductor needs process groups: torch's fake one is used, so this process must have none.
    """
    check_values(program, values, coordinate)
    check_choice("compiler", compiler, COMPILERS)
    with fake_ranks(program, coordinate) as bound:
        rank = _Rank.of(program, values, bound, compiler)
        with SingleRankCollectives():
            rank.step()  # one-time setup does not belong to the program's memory
        rank.forget()
        with SingleRankCollectives(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            rank.step()
    held = sum({storage_key(x): x.untyped_storage().nbytes() for x in rank.inputs}.values())
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return MeasuredMemory(max(itertools.accumulate(changes, initial=held)))


def check_values(program: Any, values: Any, coordinate: tuple[int, ...] | None) -> None:
    """Checks that a rank can run on ``values``: one global tensor for each of ``program.inputs``, with the traced shape and dtype."""
    if not isinstance(program, ShardedProgram):
        remedy = "pass fxshard.lower(model, args, plan), or what fxshard.load gives"
        raise OptionError(f"only a program can be measured, not {a_kind(program)}", where="program", remedy=remedy)
    if coordinate is not None and coordinate not in set(program.mesh.coordinates()):
        remedy = f"give one index per axis of {program.mesh}, each below its size; None is the first rank"
        raise OptionError(f"mesh {program.mesh} has no rank at {coordinate!r}", where="coordinate", remedy=remedy)
    remedy = "fxshard.testing.program_values(program, model, args) makes them: one whole tensor for each of program.inputs, in order"
    if not isinstance(values, Sequence) or len(values) != len(program.inputs):
        given = f"{len(values)} values" if isinstance(values, Sequence) else a_kind(values)
        raise RunError(f"{given} for the {len(program.inputs)} inputs of the program", where="values", remedy=remedy)
    for end, value, shape, dtype in zip(program.inputs, values, program.input_shapes, program.input_dtypes, strict=True):
        if not isinstance(value, torch.Tensor):
            raise RunError(f"{end.kind} {end.name!r} is {a_kind(value)}, not a tensor", where="values", remedy=remedy)
        check_value(end.name, value, shape, dtype)
        check_has_data(end.kind, end.name, value)


@dataclass(frozen=True)
class _Rank:
    """A compiled program with one rank's inputs and tangents."""

    compiled: CompiledProgram
    inputs: list[torch.Tensor]
    tangents: list[torch.Tensor]

    @staticmethod
    def of(program: ShardedProgram, values: Sequence[torch.Tensor], bound: BoundProgram, compiler: str) -> _Rank:
        graded = {o.name for o in program.outputs if o.kind == "gradient"}
        inputs: list[torch.Tensor] = []
        tangents: list[torch.Tensor] = []
        for end, value, layout in zip(program.inputs, values, program.input_layouts, strict=True):
            local = scatter(value.detach(), layout, program.mesh, bound.coordinate).clone()
            (tangents if end.kind == "tangent" else inputs).append(local.requires_grad_(end.name in graded))
        return _Rank(compile_program(bound, compiler), inputs, tangents)

    def step(self) -> Any:
        """One forward and, for training, a backward; gradients accumulate in the inputs."""
        results = self.compiled(self.inputs)
        if self.tangents:
            torch.autograd.backward([r for r in results if r.requires_grad], [t.clone() for t in self.tangents])
        return results

    def forget(self) -> None:
        for x in self.inputs:
            x.grad = None
