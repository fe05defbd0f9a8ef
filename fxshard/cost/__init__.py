"""What things cost: collectives by alpha-beta, compute by roofline, both in microseconds."""

from fxshard.cost.collectives import bucketing_saving, collective_time, time_price
from fxshard.cost.compute import compute_time

__all__ = ["collective_time", "compute_time", "bucketing_saving", "time_price"]
