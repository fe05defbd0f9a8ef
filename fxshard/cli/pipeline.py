"""``fxshard plan ... --pipeline pp --microbatches 8``: the stages of a pipeline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fxshard.errors import OptionError

if TYPE_CHECKING:
    from fxshard.mesh.mesh import Mesh

DEFAULT = "1F1B"
USED = ("parallel", "memory_limit", "cache")
"""The options of a plan that also plan a pipeline."""
ONLY_PLAN = ("infer", "output", "explain", "memory", "at", "dynamic", "example_sizes", "offload", "mixed_precision", "gathers", "html")


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    pipeline_help = "cut the model into stages along this axis and show them; the factory then returns the arguments of one microbatch"
    parser.add_argument("--pipeline", metavar="AXIS", help=pipeline_help)
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches in a step of the pipeline (default: 4 for each stage)")
    parser.add_argument("--schedule", metavar="NAME", help="of the pipeline: 1F1B (the default), GPipe or Interleaved1F1B")


def check_no_pipeline(options: argparse.Namespace) -> None:
    """Raises OptionError for options of a pipeline without ``--pipeline``."""
    given = [f"--{name}" for name in ("microbatches", "schedule") if getattr(options, name) is not None]
    if given:
        useless = " and ".join(given)
        raise OptionError(f"{useless} would have no effect without a pipeline", remedy=f"add --pipeline AXIS, or leave out {useless}")


def pipeline_text(options: argparse.Namespace, mesh: Mesh, plan_options: Mapping[str, Any]) -> str:
    """The stages as text, or as JSON. Raises OptionError for options that only the plan of a whole model has."""
    given = [name for name in ONLY_PLAN if getattr(options, name)] + (["regret"] if options.regret is not None else [])
    given += [name for name, value in plan_options.items() if name not in USED and value and value != "time"]
    if given:
        useless = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionError(f"{useless} would have no effect on a pipeline", remedy=f"leave out {useless}, or leave out --pipeline")
    from fxshard.cli.arguments.factory import load_model

    model, args, kwargs = load_model(options.model)
    from fxshard.pipelines.plan import plan_pipeline

    stages = mesh.shape[mesh.axis_names.index(options.pipeline)] if options.pipeline in mesh.axis_names else 1
    microbatches = 4 * stages if options.microbatches is None else options.microbatches
    limits = {"optimizer": options.optimizer, "time_limit": options.time_limit, **{name: plan_options[name] for name in USED}}
    step: dict[str, Any] = {"microbatches": microbatches, "mb_kwargs": kwargs, "schedule": options.schedule or DEFAULT}
    found = plan_pipeline(model, args, mesh, options.pipeline, **step, **limits)
    if options.json:
        return json.dumps({**json.loads(found.to_json()), "step_time": found.step_time, "bubble": found.bubble}, indent=1)
    return str(found)
