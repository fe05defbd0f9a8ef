"""A device mesh that needs no process group: axes, sizes, and the hardware below it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import LayoutError, OptionError, closest


@dataclass(frozen=True)
class Link:
    """What one rank sends over: ``bandwidth`` in bytes per second, ``latency`` in microseconds per hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its network.

    ``flops``: FLOP per second by element size in bytes; ``memory_bandwidth``: bytes per second; ``launch``: microseconds
    per kernel; ``node_size``: devices that ``inside`` joins, beyond it ``between`` is the slowest link.
    """

    name: str
    flops: Mapping[int, float] = field(hash=False)
    memory_bandwidth: float
    launch: float
    node_size: int
    inside: Link
    between: Link


# Dense rates from the vendors' data sheets; links are effective rates of NCCL's ring, latencies its tuner's per-hop constants.
# The cpu row is one core with gloo over loopback, rounded from a measurement: 42 GFLOP/s in float32, 13 GB/s in a copy, and
# for two ranks an all-reduce of 0.19 ms and 1 GB/s.
HARDWARE = {
    h.name: h
    for h in (
        Hardware("h100", {1: 1979e12, 2: 989e12, 4: 67e12, 8: 34e12}, 3.35e12, 3.0, 8, Link(370e9, 1.9), Link(50e9, 4.0)),
        Hardware("h200", {1: 1979e12, 2: 989e12, 4: 67e12, 8: 34e12}, 4.8e12, 3.0, 8, Link(370e9, 1.9), Link(50e9, 4.0)),
        Hardware("a100", {1: 624e12, 2: 312e12, 4: 19.5e12, 8: 9.7e12}, 2.0e12, 3.0, 8, Link(240e9, 1.9), Link(25e9, 4.0)),
        Hardware("b200", {1: 4500e12, 2: 2250e12, 4: 80e12, 8: 40e12}, 8.0e12, 3.0, 8, Link(740e9, 1.9), Link(50e9, 4.0)),
        Hardware("cpu", {1: 50e9, 2: 50e9, 4: 50e9, 8: 25e9}, 10e9, 3.0, 64, Link(2e9, 50.0), Link(1e9, 100.0)),
    )
}


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes, in the order of a ``DeviceMesh``; the last axis joins neighbouring ranks.

    ``Mesh({"dp": 2, "tp": 4}, hardware="h100")``. Raises OptionError for an unknown preset or a bad axis.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    hardware: Hardware

    def __init__(self, axes: Mapping[str, int], hardware: str | Hardware = "cpu") -> None:
        if not isinstance(axes, Mapping):
            raise OptionError(f"the axes of a mesh are a {type(axes).__name__}", remedy="give names and sizes: Mesh({'dp': 2, 'tp': 4})")
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise OptionError(f"mesh axis name {name!r} is not an identifier", remedy="name axes like 'dp' or 'tp'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise OptionError(f"mesh axis {name!r} has size {size!r}", remedy="give a positive whole number of ranks")
        if not axes:
            raise OptionError("a mesh needs at least one axis", remedy="for one device write Mesh({'dp': 1})")
        object.__setattr__(self, "axis_names", tuple(axes))
        object.__setattr__(self, "shape", tuple(axes.values()))
        object.__setattr__(self, "hardware", find_hardware(hardware))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def axis(self, name: str) -> int:
        """Index of the axis called ``name``; raises LayoutError for a name the mesh does not have."""
        if name not in self.axis_names:
            what = f"the mesh has no axis {name!r}{closest(name, self.axis_names)}"
            raise LayoutError(what, remedy=f"its axes are {', '.join(self.axis_names)}")
        return self.axis_names.index(name)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of all ranks, in rank order (the last axis runs fastest)."""
        return itertools.product(*map(range, self.shape))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        rank = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            rank = rank * size + index
        return rank

    def coordinate(self, rank: int) -> tuple[int, ...]:
        out = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            out.append(index)
        return tuple(reversed(out))

    def group(self, axis: int, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from ``coordinate`` in ``axis`` only, in the order of that axis."""
        return tuple(self.rank((*coordinate[:axis], i, *coordinate[axis + 1 :])) for i in range(self.shape[axis]))

    def link(self, axis: int) -> Link:
        """The slowest link that a collective on ``axis`` crosses."""
        span = math.prod(self.shape[axis:])
        return self.hardware.inside if span <= self.hardware.node_size else self.hardware.between

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))


def find_hardware(hardware: str | Hardware) -> Hardware:
    """A preset by name; raises OptionError naming the closest one."""
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str) or hardware not in HARDWARE:
        what = f"unknown hardware {hardware!r}{closest(hardware, HARDWARE)}"
        raise OptionError(what, where="hardware", remedy=f"presets are {', '.join(HARDWARE)}")
    return HARDWARE[hardware]


def as_mesh(mesh: Mesh | DeviceMesh, hardware: str | Hardware | None = None) -> Mesh:
    """A ``Mesh`` of the same shape as ``mesh``; unnamed axes of a DeviceMesh are called ``axis0``, ``axis1``, ..."""
    if isinstance(mesh, Mesh):
        return mesh if hardware is None else Mesh(dict(zip(mesh.axis_names, mesh.shape, strict=True)), hardware)
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            f"expected a fxshard.Mesh or a torch DeviceMesh, got {type(mesh).__name__}",
            remedy="write fxshard.Mesh({'dp': 2}) or torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('dp',))",
        )
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return Mesh(dict(zip(names, mesh.shape, strict=True)), hardware or _device_hardware(mesh.device_type))


def _device_hardware(device_type: str) -> str:
    """The preset whose name occurs in the CUDA device's name, ``cpu`` where there is none."""
    if device_type != "cuda":
        return "cpu"
    import torch

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((h for h in HARDWARE if h in name), "cpu")


def parse_mesh(text: str, hardware: str | Hardware = "cpu") -> Mesh:
    """Reads ``dp=2,tp=4``; raises OptionError on anything else."""
    if not isinstance(text, str):
        raise OptionError(f"cannot read a mesh from a {type(text).__name__}", remedy="write it like 'dp=2,tp=4'")
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, size = (side.strip() for side in part.partition("=")[::2])
        if not re.fullmatch("[0-9]{1,9}", size):
            raise OptionError(f"cannot read mesh {text!r} at {part!r}", remedy="write it like dp=2,tp=4")
        if name in axes:
            raise OptionError(f"the axis {name!r} stands twice in mesh {text!r}", remedy="give each axis a name of its own, like dp=2,tp=4")
        axes[name] = int(size)
    return Mesh(axes, hardware)
