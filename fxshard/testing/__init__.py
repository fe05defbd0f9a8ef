"""For tests: random legal plans, and comparison with one device."""

from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_plan

__all__ = ["assert_equal_to_one_device", "one_device", "random_plan"]
