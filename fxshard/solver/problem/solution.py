"""The result of a solve: choices with a certificate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Solution:
    """One strategy per node, with its certificate.

    choices: strategy index per node.
    objective: cost of the choices in the problem's own (unscaled) costs.
    lower_bound: no feasible choices cost less (equal to the objective where proven).
    gap: (objective - lower_bound) / objective, 0 for an objective of 0.
    proven: whether the choices are optimal, to 1e-9 of the objective.
    cut: whether a time or work limit ended the search; without a time limit the same input gives the same choices.
    steps: (name, effect) of each step in order, without timings.
    """

    choices: tuple[int, ...]
    objective: float
    lower_bound: float
    gap: float
    proven: bool
    cut: bool
    steps: tuple[tuple[str, str], ...] = ()


PROVEN_TOLERANCE = 1e-9
"""Relative difference between objective and bound below which the choices count as optimal."""


def certify(choices: tuple[int, ...], objective: float, bound: float, cut: bool, steps: tuple[tuple[str, str], ...]) -> Solution:
    """A `Solution` with gap and `proven` computed from objective and bound."""
    if objective - bound <= PROVEN_TOLERANCE * abs(objective):
        return Solution(choices, objective, objective, 0.0, True, False, steps)
    gap = (objective - bound) / abs(objective) if objective else float("inf")
    return Solution(choices, objective, bound, gap, False, cut, steps)
