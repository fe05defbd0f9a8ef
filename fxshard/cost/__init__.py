"""What things cost: collectives by alpha-beta, compute by roofline, both in microseconds."""

from fxshard.cost.collectives import collective_time, joining_price, time_price
from fxshard.cost.compute import compute_time

__all__ = ["collective_time", "compute_time", "joining_price", "time_price"]
