"""The cost model: collectives by alpha-beta and compute by roofline, both in microseconds; memory in bytes."""

from fxshard.cost.collectives import bucketing_saving, collective_time, time_price
from fxshard.cost.compute import compute_time
from fxshard.cost.optimizer.optimizer_time import optimizer_time
from fxshard.cost.ring import node_time, node_times

__all__ = ["collective_time", "compute_time", "bucketing_saving", "node_time", "node_times", "optimizer_time", "time_price"]
