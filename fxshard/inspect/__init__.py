"""Shows a plan or a program: as text for people, as a dict for programs. Only reads data and imports no pass.

``summary``: the decisions and their quality. ``nodes_table``: the layouts of every node. ``collectives_table``: the collectives and their
reasons. ``memory_table``: a device's memory at the peak and over time. ``passes_table`` and ``timeline_table``: the effect of the passes
after lowering, and the predicted timeline. ``to_json``: everything as plain data. ``plan_of``: the plan of a program.
"""

from fxshard.inspect.data import plan_of, to_json
from fxshard.inspect.memory import memory_table
from fxshard.inspect.tables import collectives_table, nodes_table, summary
from fxshard.inspect.timeline import passes_table, timeline_table

__all__ = ["collectives_table", "memory_table", "nodes_table", "passes_table", "plan_of", "summary", "timeline_table", "to_json"]
