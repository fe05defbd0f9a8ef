"""What TORCH_TRACE and TORCH_LOGS show of a plan and of a program: records that ``tlparse`` lists, and the screen in the debug log.

tlparse (https://github.com/pytorch/tlparse) shows records of the kind ``artifact`` as they are; it needs no change for these.
"""

from __future__ import annotations

import logging

from fxshard._torch_compat.dynamo.logs import trace_artifact
from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.fields import program_fields
from fxshard.program.sharded_program import ShardedProgram
from fxshard.views.screen import screen

log = logging.getLogger("fxshard")


def show_plan(plan: ShardingPlan) -> None:
    """The screen that ``print(plan)`` shows, and the plan's file."""
    trace_artifact("fxshard_plan", lambda: screen(view_of(plan)))
    trace_artifact("fxshard_plan_json", plan.to_json, "json")
    if log.isEnabledFor(logging.DEBUG):
        log.debug("the plan:\n%s", screen(view_of(plan)))


def show_program(program: ShardedProgram) -> None:
    """The local graphs, one for each size class, and the collectives in the order in which the program issues them, as in ``inspect``'s
    JSON."""
    trace_artifact("fxshard_local_graphs", lambda: graphs_text(program))
    trace_artifact("fxshard_collectives", lambda: program_fields(program)["collectives"], "json")


def graphs_text(program: ShardedProgram) -> str:
    """The local graph of each size class."""
    return "\n\n".join(f"size class {key}\n{module.graph}" for key, module in program.modules.items())
