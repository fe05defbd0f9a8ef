"""Seconds and memory from a model to a plan, over layers and meshes (``bench.planning``); Llama 3 8B, preset h100."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from bench.all.figures import Cell, Figure
from bench.fresh_process import in_fresh_process
from bench.planning import child

PART = "planning"
BARE = "dynamo and joint export"
POINTS = (
    *((layers, "dp=8,tp=8") for layers in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((layers, mesh) for layers in (2, 32) for mesh in ("tp=8", "dp=4,cp=4,tp=8", "dp=8,cp=8,tp=8")),
)
PUBLISHED = {(32, "dp=8,tp=8"): "autoparallel: 46.8 s, 2.7 GiB, layers tied"}
"""What autoparallel's authors and its issue say of the same model and mesh, on their machine."""
NOISE = 0.15
"""The least relative rise of processor time over that of the yardstick that counts: each is measured once."""


def cells(quick: bool = False) -> Iterator[Cell]:
    for layers, mesh in ((1, "tp=2"),) if quick else POINTS:
        yield Cell(PART, name(layers, mesh), partial(figures, layers, mesh))


def name(layers: int, mesh: str) -> str:
    return f"{layers} layers, {'x'.join(axis.split('=')[1] for axis in mesh.split(','))}"


def figures(layers: int, mesh: str) -> Iterator[Figure]:
    """Seconds, bytes, the gap; and processor time over that of a trace of two layers by torch alone, measured next, which compares
    machines."""
    cell = name(layers, mesh)
    ours = in_fresh_process(child.ours, "llama", layers, mesh, "h100", None)
    yardstick = in_fresh_process(child.bare, BARE, "llama", 2)
    used = sum(stage.cpu for stage in ours.stages)
    yield Figure(PART, cell, "seconds", sum(stage.wall for stage in ours.stages))
    yield Figure(PART, cell, "processor seconds", used)
    yield Figure(PART, cell, "over a trace of two layers", used / sum(stage.cpu for stage in yardstick.stages), noise=NOISE)
    yield Figure(PART, cell, "bytes", max(stage.memory for stage in ours.stages), noise=NOISE)
    yield Figure(PART, cell, "gap", ours.gap, noise=0.0)


HEADERS = (
    "layers, mesh",
    "seconds",
    "processor seconds",
    "over a trace of two layers by torch",
    "peak GB",
    "gap",
    "published",
    "measured",
    "load",
)


def rows(kept: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    found = {(one.cell, one.name): one for one in kept}
    for layers, mesh in POINTS:
        cell = name(layers, mesh)
        if (cell, "seconds") not in found:
            continue
        names = ("seconds", "processor seconds", "over a trace of two layers", "bytes", "gap")
        one = found[cell, "seconds"]
        seconds, used, over, size, gap = (found[cell, each].value or 0.0 for each in names)
        published = PUBLISHED.get((layers, mesh), "")
        yield (
            cell,
            f"{seconds:.1f}",
            f"{used:.1f}",
            f"{over:.2f}",
            f"{size / 1e9:.2f}",
            f"{gap:.2%}",
            published,
            one.when,
            f"{one.load:.0f}",
        )
