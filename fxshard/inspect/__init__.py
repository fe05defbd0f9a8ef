"""Shows a plan or a program: as text for people, as a dict for programs. Only reads data and imports no pass.

``summary``: the screen that ``print(plan)`` says too. ``nodes_table``, ``parameters_table``, ``collectives_table``: one line for each.
``memory_table``: a device's memory at the peak and over time. ``passes_table`` and ``timeline_table``: the effect of the passes after
lowering, and the predicted timeline. ``to_json``: everything as plain data. ``plan_of``: the plan of a program.

Names are imported when they are first asked for: ``fxshard inspect plan.json`` needs none of them, and so no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxshard.inspect.data import plan_of, to_json
    from fxshard.inspect.memory import memory_table
    from fxshard.inspect.tables import collectives_table, nodes_table, parameters_table, summary
    from fxshard.inspect.timeline import passes_table
    from fxshard.views.timeline import timeline_table

_HOME = {
    "collectives_table": "fxshard.inspect.tables",
    "memory_table": "fxshard.inspect.memory",
    "nodes_table": "fxshard.inspect.tables",
    "parameters_table": "fxshard.inspect.tables",
    "passes_table": "fxshard.inspect.timeline",
    "plan_of": "fxshard.inspect.data",
    "summary": "fxshard.inspect.tables",
    "timeline_table": "fxshard.views.timeline",
    "to_json": "fxshard.inspect.data",
}

__all__ = [
    "collectives_table",
    "memory_table",
    "nodes_table",
    "parameters_table",
    "passes_table",
    "plan_of",
    "summary",
    "timeline_table",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxshard.inspect' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
