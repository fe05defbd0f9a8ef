"""Where to cut a chain of layers into stages: the cut with the least time of a step among those that fit in memory, exactly.

For a bound T on the time of a stage, dynamic programming finds the cut with the least sum of stage times:

    best[i, b] = min over a of best[i - 1, a] + time(a, b),    time(a, b) <= T and memory(i, a, b) <= limit

The least sum + (m - 1) T over all T that are the time of some stage is the optimum: a cut is counted exactly when T is its slowest stage.
If a rank has several stages, each of them may take its share of the rank's memory.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxshard.pipelines.schedule import in_flight, stages_of_rank, step_time


@dataclass(frozen=True)
class Layer:
    """What a layer costs on a device, for one microbatch. Times are in microseconds, sizes in bytes.

    ``time``: forward and backward. ``held``: parameters, buffers and optimiser state. ``gradients``: those of one microbatch, before they
    are reduced. ``saved``: values kept for the backward. ``working``: what else is alive at its peak. ``entering``: the values that it
    takes from the layer before, if a stage begins here, and ``transfer`` the time to send them and their gradients. ``starts``: whether a
    stage may begin here.
    """

    name: str
    time: float
    held: int = 0
    gradients: int = 0
    saved: int = 0
    working: int = 0
    entering: int = 0
    transfer: float = 0.0
    starts: bool = True


@dataclass(frozen=True)
class Chain:
    """Layers in order, ``stages`` of a schedule and ``microbatches`` of a step."""

    layers: tuple[Layer, ...]
    stages: int
    microbatches: int
    schedule: str = "1F1B"

    @property
    def several(self) -> int:
        """How many stages a rank has."""
        return stages_of_rank(self.schedule)

    def step_time(self, times: Sequence[float]) -> float:
        """Microseconds of a step of stages that take ``times``."""
        return step_time(times, self.microbatches, self.several)

    def time(self, first: int, end: int) -> float:
        """Microseconds of the stage of layers ``first`` to ``end - 1`` for a microbatch, with its transfers, for which schedules wait."""
        return sum(x.time for x in self.layers[first:end]) + self._border(first).transfer + self._border(end).transfer

    def memory(self, stage: int, first: int, end: int) -> int:
        """Bytes of a stage at its peak. In the backward of a layer, it has gradients of later layers, and no longer what these saved."""
        peak = later = 0
        saved = sum(x.saved for x in self.layers[first:end])
        for layer in reversed(self.layers[first:end]):
            peak = max(peak, saved + layer.working + later)
            saved, later = saved - layer.saved, later + layer.gradients
        return sum(x.held for x in self.layers[first:end]) + max(peak, later) + self.beside(stage, first, end)

    def beside(self, stage: int, first: int, end: int) -> int:
        """Bytes that a stage holds beside those for one microbatch: what others saved, sums of gradients, and buffers for what it receives,
        of which torch keeps one for every microbatch of a step."""
        layers, others = self.layers[first:end], in_flight(self.schedule, stage, self.stages, self.microbatches) - 1
        buffers = self.microbatches * (self._border(first).entering + self._border(end).entering)
        return sum(others * x.saved + (x.gradients if self.microbatches > 1 else 0) for x in layers) + buffers

    def with_fixed(self, fixed: Collection[int]) -> Chain:
        """The chain in which no stage begins with the layers of these indices."""
        return replace(self, layers=tuple(replace(x, starts=x.starts and i not in fixed) for i, x in enumerate(self.layers)))

    def _border(self, index: int) -> Layer:
        return self.layers[index] if 0 < index < len(self.layers) else _NO_BORDER


_NO_BORDER = Layer("", 0.0)
Cut = tuple[int, ...]
"""Indices of the first layers of the stages; the first is 0."""


def bounds(cut: Cut, count: int) -> Iterator[tuple[int, int]]:
    """(first layer, end) of each stage of a chain of ``count`` layers."""
    return pairwise((*cut, count))


def best_cut(chain: Chain, memory_limit: float = math.inf) -> Cut | None:
    """The cut with the least time of a step whose stages all fit in ``memory_limit``; None if there is none. Of equal cuts, the one whose
    slowest stage is fastest."""
    stages = _stages(chain, lambda i, *ends: memory_limit == math.inf or chain.several * chain.memory(i, *ends) <= memory_limit)
    paces = sorted({time for one in stages for time in one.values()})
    least = bisect.bisect_left(paces, True, key=lambda pace: _least_sum(chain, stages, pace) is not None)
    if least == len(paces):
        return None
    total = sum(layer.time for layer in chain.layers) / chain.several
    found, best = None, math.inf
    for pace in paces[least:]:
        if total + (chain.several * chain.microbatches - 1) * pace >= best:
            break
        cut = _least_sum(chain, stages, pace)
        assert cut is not None
        time = chain.step_time([chain.time(*ends) for ends in bounds(cut, len(chain.layers))])
        if time < best:
            found, best = cut, time
    return found


def least_memory(chain: Chain) -> int | None:
    """The least bytes per device that any cut needs; None if there is no cut into so many stages."""
    every = _stages(chain, lambda *_: True)
    sizes = sorted({chain.memory(i, *ends) for i, one in enumerate(every) for ends in one})

    def fits(limit: int) -> bool:
        kept = _stages(chain, lambda i, first, end: chain.memory(i, first, end) <= limit)
        return _least_sum(chain, kept, math.inf) is not None

    at = bisect.bisect_left(sizes, True, key=fits)
    return chain.several * sizes[at] if at < len(sizes) else None


_Stages = Sequence[dict[tuple[int, int], float]]
"""For each stage, the times of the layers (first, end) that it may hold."""


def _stages(chain: Chain, fits: Callable[[int, int, int], bool]) -> _Stages:
    count, last = len(chain.layers), chain.stages - 1
    starts = [i for i, layer in enumerate(chain.layers) if i == 0 or layer.starts]
    found: list[dict[tuple[int, int], float]] = []
    for i in range(chain.stages):
        pairs = [(a, b) for a in starts for b in (*starts, count) if a < b and (a == 0) == (i == 0) and (b == count) == (i == last)]
        found.append({pair: chain.time(*pair) for pair in pairs if fits(i, *pair)})
    return found


def _least_sum(chain: Chain, stages: _Stages, pace: float) -> Cut | None:
    """The cut with the least sum of stage times among those whose stages take at most ``pace``."""
    best: dict[int, tuple[float, Cut]] = {0: (0.0, ())}
    for one in stages:
        further: dict[int, tuple[float, Cut]] = {}
        for (first, end), time in one.items():
            if time <= pace and first in best:
                total, before = best[first]
                if end not in further or total + time < further[end][0]:
                    further[end] = total + time, (*before, first)
        best = further
    return best[len(chain.layers)][1] if len(chain.layers) in best else None
