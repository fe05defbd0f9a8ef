"""The rate that products sustain in a step (``cost.kernels.SUSTAINED``): its fit, and its cross-validation, each source left out in turn.

Layouts are pinned, so another rate changes the time of products alone; what communication they hide is taken as it is at the present rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bench.published import rows
from bench.published.step_time import StepTime, predicted
from fxshard.cost.kernels import SUSTAINED

RATES = [k / 1000 for k in range(400, 1001)]


@dataclass(frozen=True)
class Held:
    """A published step and its prediction."""

    step: rows.Step
    time: StepTime

    def ratio(self, rate: float) -> float:
        """Predicted over measured if products sustain ``rate`` of the best rate."""
        return self.time.sustained(rate / SUSTAINED) / 1000 / self.step.measured


def predictions(data: Path) -> list[Held]:
    return [Held(one, predicted(one)) for one in tqdm(rows.steps(data), disable=None)]


def fitted(found: Sequence[Held]) -> float:
    """The rate with the least squares of the logarithms of predicted over measured."""
    return min(RATES, key=lambda rate: sum(math.log(one.ratio(rate)) ** 2 for one in found))


def left_out(found: Sequence[Held]) -> dict[str, tuple[float, list[Held]]]:
    """Source, as far as its first word -> the rate fitted to the other sources, and its own steps."""
    sources = [one.step.source.split()[0] for one in found]
    return {
        source: (
            fitted([one for one, other in zip(found, sources, strict=True) if other != source]),
            [one for one, other in zip(found, sources, strict=True) if other == source],
        )
        for source in dict.fromkeys(sources)
    }


def spread(found: Sequence[Held], rate: float) -> tuple[float, float, float]:
    """Least, median and largest ratio."""
    ratios = [one.ratio(rate) for one in found]
    return min(ratios), statistics.median(ratios), max(ratios)
