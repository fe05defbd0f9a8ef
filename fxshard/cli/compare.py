"""``fxshard compare FILE.py:FACTORY --mesh ... --plans auto,fsdp,...``: known plans beside the one that the solver finds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fxshard.errors import FxshardError, OptionError, closest
from fxshard.progress import progress

if TYPE_CHECKING:
    from fxshard.graph.planning_graph import PlanningGraph
    from fxshard.mesh.mesh import Mesh

PLANS = {
    "auto": "what the solver finds without a word",
    "ddp": "every axis shards the batch, parameters are whole",
    "fsdp": "every axis shards the batch and the parameters",
    "hsdp": "the first axis is DDP, the others are FSDP; needs two axes",
    "megatron": "tensor parallel on tp (or the last axis), blocks return whole values; DDP on the others",
    "megatron+sp": "likewise, and blocks return values sharded by sequence, dim 1",
}
DEFAULT = ",".join(PLANS)


def read_plans(text: str) -> list[str]:
    """The names in ``auto,fsdp``; raises OptionError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PLANS:
            raise OptionError(f"unknown plan {name!r}{closest(name, PLANS)}", where="--plans", remedy=f"give some of {DEFAULT}")
    if not names or len(set(names)) < len(names):
        raise OptionError(f"cannot read --plans {text!r}", remedy=f"give each once, for example --plans {DEFAULT}")
    return names


def compare_plans(options: argparse.Namespace, mesh: Mesh, plan_options: Mapping[str, Any], model: Any, sizes: Mapping[str, Any]) -> None:
    """Plans the model once for each name, and prints the table. The first name is what the others are compared with."""
    names = read_plans(options.plans)
    from fxshard import api
    from fxshard.passes.pipeline import Request, trace_model
    from fxshard.plans.plan_text import view_of
    from fxshard.views.compared import Compared, compared_text, plain_compared

    module, args, kwargs = model
    found: list[Compared] = []
    blocks: list[str] = []
    with progress("tracing", len(names)) as told:
        if any(name.startswith("megatron") for name in names):
            blocks = blocks_of(trace_model(Request(module, tuple(args), kwargs, not options.infer), mesh))
        for name in names:
            told.next(f"planning {name}")
            try:
                given = {**plan_options, **options_of(name, mesh, blocks, plan_options)}
                limits = {"train": not options.infer, "optimizer": options.optimizer, "time_limit": options.time_limit, **sizes}
                plan = api.plan(module, args, mesh, example_kwargs=kwargs, **limits, **given)
                found.append(Compared(name, view_of(plan)))
            except FxshardError as error:
                if name == names[0]:
                    raise
                found.append(Compared(name, None, error.what))
            told.finish()
    print(json.dumps(plain_compared(found), indent=1) if options.json else compared_text(found))


def options_of(name: str, mesh: Mesh, blocks: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``fxshard.plan`` that make a known plan. Raises OptionError if the mesh has none."""
    from fxshard.plans.parallel import DataParallel, FullyShard, TensorParallel

    axes = mesh.axis_names
    if name == "auto":
        return {}
    if name in ("ddp", "fsdp"):
        return {"parallel": dict.fromkeys(axes, DataParallel() if name == "ddp" else FullyShard())}
    if name == "hsdp":
        if mesh.ndim < 2:
            raise OptionError("hsdp needs two axes, and the mesh has one")
        return {"parallel": {axis: FullyShard() if k else DataParallel() for k, axis in enumerate(axes)}}
    tensor = "tp" if "tp" in axes else axes[-1]
    held = "".join(("R" if name == "megatron" else "S(1)") if axis == tensor else "*" for axis in axes)
    parallel = {axis: TensorParallel() if axis == tensor else DataParallel() for axis in axes}
    return {"parallel": parallel, "pins": {**dict.fromkeys(blocks, held), **(given["pins"] or {})}}


def blocks_of(graph: PlanningGraph) -> list[str]:
    """The modules of a list (``layers.3``), outermost, that return one tensor of three dims or more: the residual stream."""
    found = []
    for name, calls in graph.returned.items():
        parent, _, last = name.rpartition(".")
        if not last.isdigit() or any(part.isdigit() for part in parent.split(".")):
            continue
        values = [value for call in calls for value in call if value is not None and value in graph.by_name]
        if len(calls) == 1 and len(values) == 1 and graph.by_name[values[0]].meta["val"].dim() >= 3:
            found.append(name)
    return found
