"""The published measurements, read from CSV files, and the hardware that a row names."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fxshard.mesh.hardware import HARDWARE, Hardware

DEVICE = re.compile(r"(?P<preset>[a-z]+\d+)(-(?P<watts>\d+)W)?(-(?P<memory>[\d.]+)TB/s)?")
WATTS = {"h100": 700.0, "h200": 700.0, "a100": 400.0, "b200": 1000.0}
"""Board power of the presets' devices (data sheets of the SXM boards)."""


@dataclass(frozen=True)
class Collective:
    """``size``: bytes of the whole tensor, as nccl-tests counts them; ``measured``: microseconds."""

    kind: str
    device: str
    ranks: int
    nodes: int
    size: int
    measured: float
    source: str


@dataclass(frozen=True)
class Step:
    """A training step. ``mesh``: as on the command line; ``sequences``: per group of ranks that share them; ``measured``: milliseconds."""

    model: str
    device: str
    mesh: str
    layout: str
    sequences: int
    length: int
    recomputation: str
    measured: float
    source: str


TWO_NODES = Path(__file__).parent / "two_nodes.csv"
"""All-reduces on two nodes, in place, with their source in each row."""


def published(data: Path) -> list[Collective]:
    """Those of the folder and of ``TWO_NODES``."""
    return [*collectives(data / "collectives.csv"), *collectives(TWO_NODES)]


def collectives(path: Path) -> list[Collective]:
    return [
        Collective(
            row["kind"],
            row["device"],
            int(row["ranks"]),
            int(row["nodes"]),
            int(row["bytes"]),
            float(row["measured_us"]),
            row["source"],
        )
        for row in _read(path)
    ]


def steps(data: Path) -> list[Step]:
    return [
        Step(
            row["model"],
            row["device"],
            row["mesh"],
            row["layout"],
            int(row["sequences_per_dp_rank"]),
            int(row["sequence"]),
            row["recomputation"],
            float(row["measured_ms"]),
            row["source"],
        )
        for row in _read(data / "steps.csv")
    ]


def _read(path: Path) -> list[Mapping[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def hardware_of(device: str) -> Hardware:
    """The preset, with the limit of power and the memory bandwidth that the name gives: ``h100-500W-2.4TB/s``.

    Clocks, and with them FLOP rates, follow the cube root of the power: dynamic power is proportional to the clock and to the square of a
    voltage that rises with it.
    """
    said = DEVICE.fullmatch(device)
    if said is None or said["preset"] not in HARDWARE:
        raise ValueError(f"no preset for the device {device!r}")
    h = HARDWARE[said["preset"]]
    if said["watts"]:
        clock = (float(said["watts"]) / WATTS[h.name]) ** (1 / 3)
        h = replace(h, flops={size: rate * clock for size, rate in h.flops.items()})
    if said["memory"]:
        h = replace(h, memory_bandwidth=float(said["memory"]) * 1e12)
    return h if h == HARDWARE[h.name] else replace(h, name=device)
