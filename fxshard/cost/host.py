"""The price of copies between a device and the memory of its host."""

from __future__ import annotations

from collections.abc import Callable

from fxshard.errors import OptionError
from fxshard.mesh.hardware import Hardware

HostPrice = Callable[[int, int], float]
"""(bytes, number of copies) -> the price of copying them, in one direction or the other."""


def host_time(hardware: Hardware) -> HostPrice:
    """Microseconds: the latency of each copy, and the bytes at the bandwidth of one direction; directions do not overlap."""
    link = hardware.host
    assert link is not None
    return lambda size, copies: copies * link.latency + size / link.bandwidth * 1e6


def host_bytes(size: int, copies: int) -> float:
    """The bytes themselves, for plans that minimise bytes: a byte over the host's link counts as much as one that is sent."""
    return float(size)


def check_host(hardware: Hardware) -> None:
    """Raises OptionError if nothing is known of the link to the host."""
    if hardware.host is None:
        remedy = 'add "host": {"bandwidth": BYTES_PER_SECOND, "latency": MICROSECONDS} to the hardware file, or use a preset'
        raise OptionError(f"the hardware {hardware.name!r} does not say how fast the link to the host is", where="offload", remedy=remedy)
