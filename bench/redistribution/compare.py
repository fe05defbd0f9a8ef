"""Pairs of layouts, with the bytes that fxshard and torch's planners send between them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from bench.redistribution.torchs import PLANNERS, Sent, fake_ranks, sent
from fxshard.layout.layouts import Layout, all_layouts
from fxshard.layout.redistribution import bytes_price, path_table_for
from fxshard.layout.steps import reductions_commute
from fxshard.mesh.mesh import Mesh

ITEMSIZE = 4


@dataclass(frozen=True)
class Pair:
    """``ours``: bytes that a rank sends; ``torchs``: the same for each of torch's planners that can do it."""

    ends: tuple[Layout, Layout]
    ours: int
    steps: str
    torchs: Mapping[str, Sent]

    @property
    def ratio(self) -> float:
        """The bytes of the better of torch's planners over fxshard's."""
        least = min((one.bytes for one in self.torchs.values()), default=0)
        return least / self.ours if self.ours else math.inf if least else 0.0


def compare(mesh: Mesh, shape: tuple[int, ...], most: int | None, ops: tuple[str, ...] = ("sum",)) -> list[Pair]:
    """All pairs of different layouts, or a fixed sample of at most ``most``, for which torch has a path too."""
    layouts = list(filter(reductions_commute, all_layouts(len(shape), mesh.shape, ops)))
    every = list(itertools.permutations(layouts, 2))
    if most is not None and len(every) > most:
        every = random.Random(0).sample(every, most)
    paths = path_table_for(layouts, shape, ITEMSIZE, mesh, bytes_price)
    found = []
    with fake_ranks(mesh) as ranks:
        for ends in every:
            torchs = {name: sent(ranks, *ends, shape, ITEMSIZE, name) for name in PLANNERS}
            ours = int(paths.prices[paths.index[ends[0]], paths.index[ends[1]]])
            how = ", ".join(f"{step.kind} {mesh.axis_names[step.axis]}" for step in paths.steps(*ends))
            found.append(Pair(ends, ours, how, {name: one for name, one in torchs.items() if one is not None}))
    return [pair for pair in found if pair.torchs]
