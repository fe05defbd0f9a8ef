"""The cost model: collectives by alpha-beta and compute by roofline, both in microseconds; memory in bytes."""

from fxshard.cost.collectives import bucketing_saving, collective_time, time_price
from fxshard.cost.compute import compute_time

__all__ = ["collective_time", "compute_time", "bucketing_saving", "time_price"]
