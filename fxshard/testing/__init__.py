"""For tests: random legal plans, comparison with one device, and the memory that a program really uses."""

from fxshard.cost.recorder import MemoryRecorder
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.memory import measure_allocated, measure_memory
from fxshard.testing.random_plan import random_plan

__all__ = [
    "MemoryRecorder",
    "assert_equal_to_one_device",
    "measure_allocated",
    "measure_memory",
    "one_device",
    "program_values",
    "random_plan",
]
