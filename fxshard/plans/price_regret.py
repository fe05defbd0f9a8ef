"""What a plan loses if the prices under which it was made are wrong."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PriceRegret:
    """``errors``: by family of prices (``mesh.price_draws.FAMILIES``): they were drawn between 1 / (1 + error) and 1 + error times theirs;
    ``losses``: one number a draw, ascending: the plan's cost under these prices over that of the best plan found, minus 1; ``bounds``: the
    same over the proven lower bound of all plans, ascending. ``cut``: searches that ended early."""

    errors: Mapping[str, float]
    losses: tuple[float, ...]
    bounds: tuple[float, ...]
    cut: int = 0

    @property
    def error(self) -> float:
        """The largest of ``errors``."""
        return max(self.errors.values())

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
        sizes = sorted(set(self.errors.values()))
        wrong = f"up to {sizes[0]:.0%}" if len(sizes) == 1 else ", ".join(f"{name} {one:.0%}" for name, one in self.errors.items() if one)
        text = f"if each price is wrong by {wrong} ({count} draws): the plan loses {self.median:.2%} at the median"
        text += f" and {self.most:.2%} at most (proven: at most {self.proven:.2%}); it stays the best in {kept} of {count}"
        return f"{text}; {self.cut} of the searches were cut short" if self.cut else text
