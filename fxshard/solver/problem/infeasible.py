"""Errors of a solve that finds no plan."""

from __future__ import annotations


class InfeasibleError(Exception):
    """The problem has no feasible plan.

    nodes: indexes of nodes whose states the forbidden entries exclude, all nodes where only several together do; empty where a limit is
        the reason.
    least_usage: the smallest peak found among allowed choices, bytes; a limit of this size is feasible (None: no limit is the reason).
    usage_bound: a lower bound on the peak of every allowed choice, bytes (None: no limit is the reason).
    least_choices: the choices that reach `least_usage` (None: no limit is the reason).
    row: name of the row that cannot be satisfied; the two usages are then in its units (None: memory).
    cut: whether the budget ended the search for `least_usage`; a longer search may find less.
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
    """The search ended before it found a plan or proved that there is none.

    reason: why it ended.
    misses: for each limit that no plan found satisfies, the closest that the search came, in the form of an `InfeasibleError`.
    together: the names of all limits' rows (None: memory) if choices are known that meet each one alone, but none that meet all.
    cut: whether a limit of time or work ended the search; with a higher one it would go on.
    """

    def __init__(
        self, reason: str, misses: tuple[InfeasibleError, ...] = (), together: tuple[str | None, ...] = (), cut: bool = False
    ) -> None:
        super().__init__(f"no plan that fits was found, nor a proof that there is none: {reason}")
        self.reason = reason
        self.misses = misses
        self.together = together
        self.cut = cut


class Exhausted(Exception):
    """Inside the solver: no allowed choice cheaper than the best plan is left."""
