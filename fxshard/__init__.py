"""fxshard: an ordinary PyTorch model, run sharded over a device mesh by graph passes.

    mesh = fxshard.Mesh({"dp": 2, "tp": 4}, hardware="h100")
    plan = fxshard.plan(model, example_args, mesh)

Names are imported when they are first asked for, so that ``fxshard --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxshard.collecting import no_collections

if TYPE_CHECKING:
    from fxshard.api import diff, export, load, local_batch, lower, parallelize, plan, simulate
    from fxshard.cost.optimizer.optimizer_state import Optimizer
    from fxshard.errors import FxshardError
    from fxshard.inspect.picture import visualize
    from fxshard.layout.layouts import Layout
    from fxshard.mesh.hardware import Hardware, Link
    from fxshard.mesh.mesh import Mesh
    from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision
    from fxshard.pipelines.plan import PipelinePlan, plan_pipeline
    from fxshard.pipelines.stage import pipeline
    from fxshard.plans.constraints import Communication, Equal, Forbid, Pin
    from fxshard.plans.parallel import ContextParallel, DataParallel, ExpertParallel, FullyShard, HybridShard, TensorParallel
    from fxshard.plans.plan_data import OpSpec
    from fxshard.plans.sharding_plan import ShardingPlan
    from fxshard.program.sharded_program import ShardedProgram
    from fxshard.runtime.checkpoint import load_checkpoint, save_checkpoint
    from fxshard.runtime.measure.profile import profile_step
    from fxshard.runtime.module.accumulation import no_sync
    from fxshard.runtime.module.styles import parallelize_module
    from fxshard.runtime.optim.clipping import clip_grad_norm_
    from fxshard.runtime.rank_graph.memory import program_memory
    from fxshard.runtime.report import save_report
    from fxshard.strategies.engine.user_rules import register_rule

__version__ = "0.1.0"

_HOME = {
    "diff": "fxshard.api",
    "export": "fxshard.api",
    "load": "fxshard.api",
    "local_batch": "fxshard.api",
    "lower": "fxshard.api",
    "parallelize": "fxshard.runtime.module.module",
    "parallelize_module": "fxshard.runtime.module.styles",
    "pipeline": "fxshard.pipelines.stage",
    "plan": "fxshard.api",
    "plan_pipeline": "fxshard.pipelines.plan",
    "simulate": "fxshard.api",
    "Communication": "fxshard.plans.constraints",
    "Equal": "fxshard.plans.constraints",
    "Forbid": "fxshard.plans.constraints",
    "Pin": "fxshard.plans.constraints",
    "ContextParallel": "fxshard.plans.parallel",
    "DataParallel": "fxshard.plans.parallel",
    "ExpertParallel": "fxshard.plans.parallel",
    "FullyShard": "fxshard.plans.parallel",
    "HybridShard": "fxshard.plans.parallel",
    "TensorParallel": "fxshard.plans.parallel",
    "Optimizer": "fxshard.cost.optimizer.optimizer_state",
    "FxshardError": "fxshard.errors",
    "Layout": "fxshard.layout.layouts",
    "Hardware": "fxshard.mesh.hardware",
    "Link": "fxshard.mesh.hardware",
    "Mesh": "fxshard.mesh.mesh",
    "PipelinePlan": "fxshard.pipelines.plan",
    "MixedPrecision": "fxshard.passes.trace.fakes.mixed_precision",
    "ShardedProgram": "fxshard.program.sharded_program",
    "clip_grad_norm_": "fxshard.runtime.optim.clipping",
    "load_checkpoint": "fxshard.runtime.checkpoint",
    "save_checkpoint": "fxshard.runtime.checkpoint",
    "no_sync": "fxshard.runtime.module.accumulation",
    "program_memory": "fxshard.runtime.rank_graph.memory",
    "profile_step": "fxshard.runtime.measure.profile",
    "save_report": "fxshard.runtime.report",
    "OpSpec": "fxshard.plans.plan_data",
    "ShardingPlan": "fxshard.plans.sharding_plan",
    "register_rule": "fxshard.strategies.engine.user_rules",
    "visualize": "fxshard.inspect.picture",
}
_MODULES = ("testing", "inspect", "errors")

__all__ = [
    "Communication",
    "ContextParallel",
    "DataParallel",
    "Equal",
    "ExpertParallel",
    "Forbid",
    "FullyShard",
    "FxshardError",
    "Hardware",
    "HybridShard",
    "Layout",
    "Link",
    "Mesh",
    "MixedPrecision",
    "OpSpec",
    "Optimizer",
    "Pin",
    "PipelinePlan",
    "ShardedProgram",
    "ShardingPlan",
    "TensorParallel",
    "clip_grad_norm_",
    "diff",
    "export",
    "load",
    "load_checkpoint",
    "local_batch",
    "lower",
    "no_sync",
    "parallelize",
    "parallelize_module",
    "pipeline",
    "plan",
    "plan_pipeline",
    "profile_step",
    "program_memory",
    "register_rule",
    "save_checkpoint",
    "save_report",
    "simulate",
    "visualize",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with no_collections():
            value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        with no_collections():
            return import_module(f"fxshard.{name}")
    raise AttributeError(f"module 'fxshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
