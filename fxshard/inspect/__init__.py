"""Looking at a plan or a program: texts for people, a dict for programs. Reads data only, imports no pass.

``summary``: what was decided and how good it is; ``nodes_table``: every node's layouts; ``collectives_table``: what is
communicated and why; ``memory_table``: what a device holds at the peak and over time; ``to_json``: all of it as plain data;
``plan_of``: the plan of a program.
"""

from fxshard.inspect.data import plan_of, to_json
from fxshard.inspect.memory import memory_table
from fxshard.inspect.tables import collectives_table, nodes_table, summary

__all__ = ["collectives_table", "memory_table", "nodes_table", "plan_of", "summary", "to_json"]
