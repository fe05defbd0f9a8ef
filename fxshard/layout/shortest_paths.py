"""Cheapest paths between all nodes of a graph (Floyd-Warshall), and sums of figures along them, in compiled loops.

Our own, because all ranks must find the same of several cheapest paths.
"""

from __future__ import annotations

import numpy as np

from fxshard.compiled import compiled

TIE = 1e-7
"""Added to the price of each step, so that of two equal paths the one with fewer steps wins; half of it is added to a path through folded
layouts, so that of equally many steps those on plain layouts win."""

DIRECT = -1
"""Stands for "no node in between"."""


def all_pairs(weights: np.ndarray, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, n) prices of the cheapest paths and, for each pair, a node in between or ``DIRECT``.

    ``weights``: (n, n) prices of the edges, `inf` for none; ``hops``: steps of each edge, plus 1/2 for a path through folded layouts.
    ``TIE`` per hop breaks ties, but is not part of the prices.
    """
    prices, distance = weights.copy(), weights + TIE * hops
    via = np.full(weights.shape, DIRECT, dtype=np.int32)
    _relax(prices, distance, via)
    return prices, via


def along(figures: np.ndarray, direct: np.ndarray, via: np.ndarray, reachable: np.ndarray) -> np.ndarray:
    """(n, n) sums of a figure of each edge along the path of each pair; 0 where it is not ``reachable``. Each sum comes from those of the
    two halves of its path. ``figures``: (n, n) of the edges; ``direct``: (n, n) whether the path of a pair is its edge; ``via``: as from
    ``all_pairs``."""
    found = np.where(direct, figures, 0.0)
    known = direct | ~reachable
    np.fill_diagonal(known, True)
    _add_halves(found, known, via)
    return found


@compiled
def _relax(prices: np.ndarray, distance: np.ndarray, via: np.ndarray) -> None:
    """Most rows are left as they are by most nodes in between; the first of the two inner loops finds that out, and vectorises."""
    count = len(distance)
    for k in range(count):
        for i in range(count):
            first = distance[i, k]
            if first == np.inf:
                continue
            better = 0
            for j in range(count):
                better += first + distance[k, j] < distance[i, j] - 1e-12
            if not better:
                continue
            for j in range(count):
                if first + distance[k, j] < distance[i, j] - 1e-12:
                    distance[i, j] = first + distance[k, j]
                    prices[i, j] = prices[i, k] + prices[k, j]
                    via[i, j] = k


@compiled
def _add_halves(found: np.ndarray, known: np.ndarray, via: np.ndarray) -> None:
    count = len(found)
    stack = np.empty((2 * count + 2, 2), dtype=np.int64)
    for i in range(count):
        for j in range(count):
            depth = 0
            stack[0, 0], stack[0, 1] = i, j
            while depth >= 0:
                a, b = stack[depth, 0], stack[depth, 1]
                middle = via[a, b]
                if known[a, b]:
                    depth -= 1
                elif not known[a, middle]:
                    depth += 1
                    stack[depth, 0], stack[depth, 1] = a, middle
                elif not known[middle, b]:
                    depth += 1
                    stack[depth, 0], stack[depth, 1] = middle, b
                else:
                    found[a, b] = found[a, middle] + found[middle, b]
                    known[a, b] = True
                    depth -= 1
