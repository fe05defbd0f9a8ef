"""The pipeline: from a model to a plan and a program, one pass after another, each recorded and, on wish, dumped.

Every pass takes a ``Compilation`` and returns it with one more field filled; nothing travels in any other way.
"""

from __future__ import annotations

import difflib
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fxshard.errors import OptionError
from fxshard.mesh import Mesh
from fxshard.passes import annotate, choose, constrain, formulate, lower, trace, verify
from fxshard.passes.annotate import Annotated
from fxshard.passes.constrain import Constraints
from fxshard.passes.formulate import OBJECTIVES, Formulation
from fxshard.planning_graph import PlanningGraph
from fxshard.program import ShardedProgram
from fxshard.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Request:
    """What the user asked for; fields as in ``fxshard.plan``."""

    model: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True
    input_layouts: Any = None
    output_layouts: Any = None
    pins: Any = None
    memory_limit: int | None = None
    objective: str = "time"
    time_limit: float | None = None


@dataclass(frozen=True)
class PassRecord:
    """What a pass did: its name, how long it took, what it made."""

    name: str
    milliseconds: float
    made: str


@dataclass(frozen=True)
class Compilation:
    """The state between passes: None where a pass has not run yet."""

    mesh: Mesh
    request: Request = field(default_factory=Request)
    graph: PlanningGraph | None = None
    annotated: Annotated | None = None
    constraints: Constraints | None = None
    formulation: Formulation | None = None
    plan: ShardingPlan | None = None
    program: ShardedProgram | None = None
    records: tuple[PassRecord, ...] = ()


def _trace(c: Compilation) -> tuple[Compilation, str]:
    assert c.request.model is not None
    graph = trace.trace(c.request.model, c.request.args, c.request.kwargs, train=c.request.train)
    return replace(c, graph=graph), f"graph of {len(list(graph.nodes))} nodes, hash {graph.hash[:12]}"


def _annotate(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None
    annotated = annotate.annotate(c.graph, c.mesh)
    most = max((len(s) for s in annotated.specs.values()), default=0)
    return replace(
        c, annotated=annotated
    ), f"{sum(map(len, annotated.specs.values()))} specs, at most {most} a node, {len(annotated.fallbacks)} fallbacks"


def _constrain(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None
    r = c.request
    found = constrain.constraints_of(
        c.graph, c.mesh, input_layouts=r.input_layouts, output_layouts=r.output_layouts, pins=r.pins, memory_limit=r.memory_limit
    )
    return replace(
        c, constraints=found
    ), f"{len(found.values)} pinned values, {len(found.results)} pinned results, {len(found.specs)} pinned specs"


def _formulate(c: Compilation) -> tuple[Compilation, str]:
    assert c.annotated is not None and c.constraints is not None
    made = formulate.formulate(c.annotated, c.constraints, c.request.objective)
    return replace(c, formulation=made), f"{len(made.problem.node_costs)} variables, {len(made.problem.edges)} edges"


def _choose(c: Compilation) -> tuple[Compilation, str]:
    assert c.annotated is not None and c.constraints is not None and c.formulation is not None
    plan = choose.choose(c.annotated, c.constraints, c.formulation, c.request.time_limit)
    return replace(
        c, plan=plan
    ), f"objective {plan.objective:.6g} {plan.certificate.unit}, gap {plan.gap:.4%}, {len(plan.collectives)} collectives"


def _verify(c: Compilation) -> tuple[Compilation, str]:
    assert c.annotated is not None and c.plan is not None
    verify.verify_plan(c.annotated, c.plan)
    return c, "plan is legal"


def _lower(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None and c.plan is not None
    program = lower.lower(c.graph, c.plan)
    return replace(c, program=program), f"{len(program.modules)} local graphs, {len(program.collectives)} collectives"


Pass = Callable[[Compilation], tuple[Compilation, str]]

PLANNING: tuple[tuple[str, Pass], ...] = (
    ("trace", _trace),
    ("annotate", _annotate),
    ("constrain", _constrain),
    ("formulate", _formulate),
    ("choose", _choose),
    ("verify", _verify),
)
LOWERING: tuple[tuple[str, Pass], ...] = (("lower", _lower),)


Dump = str | Path | Literal[False] | None
"""A folder for dumps; None: that of FXSHARD_DUMP, if any; False: none."""


def run(passes: Sequence[tuple[str, Pass]], state: Compilation, dump: Dump = None) -> Compilation:
    """Runs ``passes`` in order; with ``dump`` (or FXSHARD_DUMP) each writes one readable file, a failing one its error.

    A file's number is the place of its pass in the pipeline, so that several runs fill one folder.
    """
    if state.request.objective not in OBJECTIVES:
        close = difflib.get_close_matches(str(state.request.objective), OBJECTIVES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise OptionError(
            f"unknown objective {state.request.objective!r}{hint}", where="objective", remedy=f"use one of {', '.join(OBJECTIVES)}"
        )
    limit = state.request.time_limit
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
        raise OptionError(f"cannot read time_limit={limit!r}", where="time_limit", remedy="give seconds, more than 0")
    folder = _dump_folder(dump)
    for name, one in passes:
        start = time.perf_counter()
        try:
            state, made = one(state)
        except Exception:
            if folder is not None:
                _write(folder, _place(name, state), f"{name}.failed", _history(state) + "\n" + traceback.format_exc())
            raise
        place = _place(name, state)
        record = PassRecord(name, (time.perf_counter() - start) * 1e3, made)
        state = replace(state, records=(*state.records, record))
        if folder is not None:
            _write(folder, place, name, _history(state) + "\n" + _readable(name, state))
    return state


def trace_model(request: Request, mesh: Mesh, dump: Dump = None) -> PlanningGraph:
    """The graph of the request's model, traced as the first pass of a pipeline."""
    state = run(PLANNING[:1], Compilation(mesh, request), dump)
    assert state.graph is not None
    return state.graph


def plan_graph(graph: PlanningGraph, mesh: Mesh, request: Request, dump: Dump = None) -> ShardingPlan:
    """Plans a graph that is traced already."""
    state = run(PLANNING[1:], Compilation(mesh, request, graph), dump)
    assert state.plan is not None
    return state.plan


def lower_plan(graph: PlanningGraph, plan: ShardingPlan, dump: Dump = None) -> ShardedProgram:
    """Lowers a plan; raises PlanError when it is for another graph."""
    state = run(LOWERING, Compilation(plan.mesh, graph=graph, plan=plan), dump)
    assert state.program is not None
    return state.program


def _place(name: str, state: Compilation) -> int:
    """The place of a pass in the pipeline; one that is not of it comes after those that have run."""
    names = [known for known, _ in (*PLANNING, *LOWERING)]
    return names.index(name) if name in names else len(state.records)


def _dump_folder(dump: Dump) -> Path | None:
    chosen = dump or os.environ.get("FXSHARD_DUMP")
    if not chosen or dump is False:
        return None
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(folder: Path, index: int, name: str, text: str) -> None:
    (folder / f"{index:02d}_{name}.txt").write_text(text + "\n")


def _history(state: Compilation) -> str:
    return "\n".join(f"# {r.name}: {r.made} ({r.milliseconds:.1f} ms)" for r in state.records)


def _readable(name: str, state: Compilation) -> str:
    """The result of the pass called ``name`` as text."""
    if name == "trace" and state.graph is not None:
        return str(state.graph.module.graph)
    if name == "annotate" and state.annotated is not None:
        return "\n".join(f"{node}:\n  " + "\n  ".join(map(str, specs)) for node, specs in state.annotated.specs.items())
    if name == "constrain":
        return str(state.constraints)
    if name == "formulate" and state.formulation is not None:
        problem = state.formulation.problem
        return "\n".join(f"{problem.name(i)}: {len(c)} states" for i, c in enumerate(problem.node_costs))
    if name in ("choose", "verify"):
        return str(state.plan)
    if name == "lower" and state.program is not None:
        return "\n\n".join(f"size class {key}\n{module.graph}" for key, module in state.program.modules.items())
    return ""
