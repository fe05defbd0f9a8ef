"""What a plan loses if the prices under which it was made are wrong."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class PriceRegret:
    """``error``: prices were drawn between 1 / (1 + error) and 1 + error times theirs; ``losses``: one number a draw, ascending: the plan's
    cost under these prices over that of the best plan found, minus 1; ``bounds``: the same over the proven lower bound of all plans,
    ascending. ``cut``: searches that ended early."""

    error: float
    losses: tuple[float, ...]
    bounds: tuple[float, ...]
    cut: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.losses)

    @property
    def most(self) -> float:
        """The largest loss over the best plan found."""
        return self.losses[-1]

    @property
    def proven(self) -> float:
        """No plan beats this one by more in any of the draws."""
        return self.bounds[-1]

    def __str__(self) -> str:
        count, kept = len(self.losses), sum(loss <= 1e-9 for loss in self.losses)
        text = f"if each price is wrong by up to {self.error:.0%} ({count} draws): the plan loses {self.median:.2%} at the median"
        text += f" and {self.most:.2%} at most (proven: at most {self.proven:.2%}); it stays the best in {kept} of {count}"
        return f"{text}; {self.cut} of the searches were cut short" if self.cut else text
