"""A device mesh without a process group: axes, sizes, and how axes map to nodes and links."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.errors import LayoutError, OptionError, a_kind, closest
from fxshard.mesh.hardware import HARDWARE, Hardware, Link
from fxshard.mesh.hardware_file import find_hardware

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")


@dataclass(frozen=True)
class Span:
    """How the groups of an axis map to nodes: ``size`` ranks each, ``stride`` ranks apart, ``per_node`` of them on one node.

    ``per_node`` is ``size`` if every group lies in one node, 1 if each rank of a group is in another node, and None if nodes
    hold different numbers of a group's ranks.
    """

    size: int
    stride: int
    per_node: int | None

    @property
    def is_inside(self) -> bool:
        return self.per_node == self.size


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes, in the order of a ``DeviceMesh``; ranks that are neighbours on the last axis have consecutive numbers.

    ``Mesh({"dp": 2, "tp": 4}, hardware="h100")``. ``hardware``: a preset's name, a file that ``fxshard calibrate`` wrote,
    or a ``Hardware``; ``links``: links of single axes by name, which replace the hardware's.
    Raises OptionError for an unknown preset or a bad axis, FileError for an invalid file.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    hardware: Hardware

    def __init__(self, axes: Mapping[str, int], hardware: str | Path | Hardware = "cpu", links: Mapping[str, Link] | None = None) -> None:
        if not isinstance(axes, Mapping):
            raise OptionError(f"the axes of a mesh are {a_kind(axes)}", remedy="give names and sizes: Mesh({'dp': 2, 'tp': 4})")
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise OptionError(f"mesh axis name {name!r} is not an identifier", remedy="name axes like 'dp' or 'tp'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise OptionError(f"mesh axis {name!r} has size {size!r}", remedy="give a positive whole number of ranks")
        if not axes:
            raise OptionError("a mesh needs at least one axis", remedy="for one device write Mesh({'dp': 1})")
        object.__setattr__(self, "axis_names", tuple(axes))
        object.__setattr__(self, "shape", tuple(axes.values()))
        found = find_hardware(hardware)
        object.__setattr__(self, "hardware", replace(found, axes={**found.axes, **links}) if links else found)
        for name in links or ():
            self.axis(name)
        for axis in range(self.ndim):
            self.link(axis)

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

    def span(self, axis: int) -> Span:
        """How the groups of ``axis`` map to nodes; a node holds ``hardware.node_size`` consecutive ranks."""
        size, stride, node = self.shape[axis], math.prod(self.shape[axis + 1 :]), self.hardware.node_size
        block = size * stride
        if size == 1 or self.size <= node or node % block == 0:
            return Span(size, stride, size)
        if stride >= node:
            return Span(size, stride, 1)
        return Span(size, stride, node // stride if node % stride == block % node == 0 else None)

    def link(self, axis: int) -> Link:
        """The slowest link that a collective on ``axis`` crosses; raises OptionError if the hardware has no such link."""
        h, name = self.hardware, self.axis_names[axis]
        link = h.axes.get(name, h.inside if self.span(axis).is_inside else h.between)
        if link is None:
            what = f"axis {name!r} joins nodes, and the hardware {h.name!r} does not know the link between them"
            remedy = "calibrate on two nodes, give links={" + repr(name) + ": Link(bandwidth, latency)}, or write 'between' into its file"
            raise OptionError(what, where=f"a mesh of {self.size} ranks on nodes of {h.node_size}", remedy=remedy)
        return link

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))


def as_mesh(mesh: Mesh | DeviceMesh, hardware: str | Path | Hardware | None = None) -> Mesh:
    """A ``Mesh`` of the same shape as ``mesh``; unnamed axes of a DeviceMesh are called ``axis0``, ``axis1``, ..."""
    from torch.distributed.device_mesh import DeviceMesh  # imported here so that parsing a mesh does not import torch

    if isinstance(mesh, Mesh):
        return mesh if hardware is None else Mesh(dict(zip(mesh.axis_names, mesh.shape, strict=True)), hardware)
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            f"expected a fxshard.Mesh or a torch DeviceMesh, got {type(mesh).__name__}",
            remedy="write fxshard.Mesh({'dp': 2}) or torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('dp',))",
        )
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return Mesh(dict(zip(names, mesh.shape, strict=True)), hardware or preset_of_device(mesh.device_type))


def preset_of_device(device_type: str) -> str:
    """The preset whose name occurs in the CUDA device's name; for another GPU ``OTHER_GPU``, with a warning, and for the CPU ``cpu``."""
    if device_type != "cuda":
        return "cpu"
    import torch

    return _preset_of_gpu(torch.cuda.get_device_name() if torch.cuda.is_available() else "")


OTHER_GPU = "a100"


@lru_cache
def _preset_of_gpu(name: str) -> str:
    """Once for each name, so that the warning comes once."""
    found = next((h for h in HARDWARE if h in name.lower()), None)
    if found is None:
        what = f"no preset is known for the GPU {name}" if name else "there is no GPU here whose preset could be taken"
        log.warning("%s: plans use the prices of %s; to do: pass hardware=, a preset or a file of 'fxshard calibrate'", what, OTHER_GPU)
    return found or OTHER_GPU


def parse_mesh(text: str, hardware: str | Path | Hardware = "cpu") -> Mesh:
    """Reads ``dp=2,tp=4``; raises OptionError on anything else."""
    if not isinstance(text, str):
        raise OptionError(f"cannot read a mesh from {a_kind(text)}", remedy="write it like 'dp=2,tp=4'")
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, size = (side.strip() for side in part.partition("=")[::2])
        if not re.fullmatch("[0-9]{1,9}", size):
            raise OptionError(f"cannot read mesh {text!r} at {part!r}", remedy="write it like dp=2,tp=4")
        if name in axes:
            raise OptionError(f"the axis {name!r} occurs twice in mesh {text!r}", remedy="give each axis a name of its own, like dp=2,tp=4")
        axes[name] = int(size)
    return Mesh(axes, hardware)
