"""fxshard: an ordinary PyTorch model, run sharded over a device mesh by graph passes.

    mesh = fxshard.Mesh({"dp": 2, "tp": 4}, hardware="h100")
    plan = fxshard.plan(model, example_args, mesh)
"""

from fxshard.api import plan, program, simulate
from fxshard.errors import FxshardError
from fxshard.mesh import Hardware, Link, Mesh
from fxshard.program import ShardedProgram
from fxshard.sharding_plan import OpSpec, ShardingPlan

__version__ = "0.1.0"

__all__ = ["FxshardError", "Hardware", "Link", "Mesh", "OpSpec", "ShardedProgram", "ShardingPlan", "plan", "program", "simulate"]
