"""Hardware of round prices, for tests of what passes do with them."""

from dataclasses import replace

from fxshard.mesh.hardware import HARDWARE

RATES = replace(HARDWARE["h100"], name="rates", architecture="")
"""The rates and links of an H100, which kernels and collectives reach."""
