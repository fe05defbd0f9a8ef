"""Looking at a plan or a program: texts for people, a dict for programs. Reads data only, imports no pass.

``summary``: what was decided and how good it is; ``nodes_table``: every node's layouts; ``collectives_table``: what is
communicated and why; ``memory_table``: what a device holds at the peak and over time; ``passes_table`` and ``timeline_table``: what the
passes after lowering made of a program, and when what runs; ``to_json``: all of it as plain data; ``plan_of``: the plan of a program.
"""

from fxshard.inspect.data import plan_of, to_json
from fxshard.inspect.memory import memory_table
from fxshard.inspect.tables import collectives_table, nodes_table, summary
from fxshard.inspect.timeline import passes_table, timeline_table

__all__ = ["collectives_table", "memory_table", "nodes_table", "passes_table", "plan_of", "summary", "timeline_table", "to_json"]
