"""Plans of one model on one mesh: the solver's and the known ones, each evaluated by ``bench.quality.evaluate``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.quality.evaluate import evaluated
from bench.quality.models import MODELS
from bench.quality.prices import DEVICES
from fxshard.cli.compare import blocks_of, options_of
from fxshard.errors import FxshardError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph, trace_model
from fxshard.plans.parallel import DataParallel, FullyShard, TensorParallel, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan

MESHES: dict[str, dict[str, int]] = {
    "8": {"tp": 8},
    "64": {"dp": 64},
    "8x8": {"dp": 8, "tp": 8},
    "4x16": {"dp": 4, "tp": 16},
    "2x4x8": {"pod": 2, "dp": 4, "tp": 8},
}
AUTO, FSDP_TP = "auto", "fsdp x tp"
KNOWN = ("ddp", "fsdp", "hsdp", "megatron", "megatron+sp", FSDP_TP)


@dataclass(frozen=True)
class Row:
    """A plan of a model on a mesh. ``objective``: fxshard's price; the others are the evaluator's, in microseconds; ``seconds``: processor
    time. ``failed``: why there is no plan."""

    model: str
    mesh: str
    preset: str
    plan: str
    objective: float = 0.0
    gap: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    copies: float = 0.0
    total: float = 0.0
    seconds: float = 0.0
    failed: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.mesh, self.preset, self.plan

    def data(self) -> dict[str, Any]:
        return asdict(self)


def traced(model: str) -> PlanningGraph:
    """The training graph of a model."""
    module, args, kwargs = MODELS[model]()
    return trace_model(Request(module, tuple(args), kwargs), Mesh({"tp": 8}, "h100"))


def rows(graph: PlanningGraph, model: str, mesh: str, preset: str, plans: tuple[str, ...] = (AUTO, *KNOWN)) -> Iterator[Row]:
    """A row for each plan."""
    on = Mesh(MESHES[mesh], preset)
    for plan in plans:
        start = time.process_time()
        try:
            found = planned(graph, on, plan)
        except FxshardError as error:
            yield Row(model, mesh, preset, plan, failed=f"{error.what:.200}")
            continue
        local = lower(graph, found).local((0,) * on.ndim).graph
        cost = evaluated(local, parameters(graph), MESHES[mesh], DEVICES[preset])
        times = (found.objective, found.gap, cost.compute, cost.communication, cost.hidden, cost.copies, cost.total)
        yield Row(model, mesh, preset, plan, *(round(one, 6) for one in times), round(time.process_time() - start, 2))


def planned(graph: PlanningGraph, mesh: Mesh, plan: str) -> ShardingPlan:
    """The plan of that name. Inputs and outputs are laid out as it likes: the solver has no constraint that a known plan lacks."""
    options = _options(graph, mesh, plan)
    words = read_parallel(options.get("parallel"), mesh)
    return plan_graph(graph, mesh, Request(pins=options.get("pins"), parallel=words, cache=False))


def _options(graph: PlanningGraph, mesh: Mesh, plan: str) -> Mapping[str, Any]:
    if plan != FSDP_TP:
        return options_of(plan, mesh, blocks_of(graph), {"pins": None})
    if mesh.ndim < 2:
        raise FxshardError("fsdp x tp needs two axes, and the mesh has one")
    *outer, last = mesh.axis_names
    return {"parallel": {**dict.fromkeys(outer[:-1], DataParallel()), outer[-1]: FullyShard(), last: TensorParallel()}}


def parameters(graph: PlanningGraph) -> frozenset[str]:
    """The placeholders of parameters."""
    return frozenset(one.node for one in graph.inputs if one.kind == "parameter")
