"""The error of a problem that has no solution."""

from __future__ import annotations


class InfeasibleError(Exception):
    """No choice of strategies is allowed.

    nodes: indexes of a small set of nodes that already conflict among themselves; empty where memory is the reason.
    least_usage: the smallest peak found that the costs allow, bytes; a limit of this much is enough (None: not memory).
    usage_bound: no allowed choice peaks below this, bytes (None: not memory).
    least_choices: the choices that use so little (None: neither memory nor a row).
    row: name of the row that cannot be kept, in whose units these two are then (None: memory).
    cut: whether the budget ended the search for the least; longer, it may find less.
    """

    def __init__(
        self,
        message: str,
        nodes: tuple[int, ...] = (),
        least_usage: float | None = None,
        usage_bound: float | None = None,
        row: str | None = None,
        least_choices: tuple[int, ...] | None = None,
        cut: bool = False,
    ) -> None:
        super().__init__(message)
        self.nodes = nodes
        self.least_usage = least_usage
        self.usage_bound = usage_bound
        self.row = row
        self.least_choices = least_choices
        self.cut = cut


class NoPlanError(Exception):
    """The search ended before it found a plan or a proof that there is none.

    misses: for each limit that nothing found keeps, how near was come to it, as the error where nothing can.
    """

    def __init__(self, message: str, misses: tuple[InfeasibleError, ...] = ()) -> None:
        super().__init__(message)
        self.misses = misses


class Exhausted(Exception):
    """Inside the solver: nothing is left that is allowed and cheaper than the best plan."""
