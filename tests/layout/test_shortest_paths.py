"""Cheapest paths against networkx's Dijkstra, and sums along them against the paths themselves."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.layout.shortest_paths import DIRECT, all_pairs, along

Edges = dict[tuple[int, int], int]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """Prices from 0 to 4, so that many paths cost the same."""
    count = draw(st.integers(1, 9))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] != pair[1])
    return count, draw(st.dictionaries(pairs, st.integers(0, 4), max_size=30)) if count > 1 else {}


def arrays(count: int, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    weights, hops = np.full((count, count), np.inf), np.zeros((count, count))
    np.fill_diagonal(weights, 0.0)
    for pair, price in edges.items():
        weights[pair], hops[pair] = price, 1
    return weights, hops


def path(via: np.ndarray, i: int, j: int) -> list[int]:
    if via[i, j] == DIRECT:
        return [i, j]
    return path(via, i, via[i, j])[:-1] + path(via, via[i, j], j)


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_paths_are_the_cheapest_and_have_the_fewest_steps(graph: tuple[int, Edges]) -> None:
    count, edges = graph
    known = nx.DiGraph()
    known.add_nodes_from(range(count))
    known.add_weighted_edges_from((i, j, 1000 * price + 1) for (i, j), price in edges.items())  # steps count after the price
    best = dict(nx.all_pairs_dijkstra_path_length(known))
    prices, via = all_pairs(*arrays(count, edges))
    for i in range(count):
        for j in range(count):
            if j not in best[i]:
                assert prices[i, j] == np.inf
            elif i != j:
                found = path(via, i, j)
                assert sum(edges[pair] for pair in itertools.pairwise(found)) == prices[i, j] == best[i][j] // 1000
                assert len(found) - 1 == best[i][j] % 1000


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_sums_along_the_paths(graph: tuple[int, Edges]) -> None:
    count, edges = graph
    prices, via = all_pairs(*arrays(count, edges))
    figures, direct = np.zeros(prices.shape), np.zeros(prices.shape, dtype=bool)
    for number, pair in enumerate(edges):
        figures[pair], direct[pair] = 2.0**number, via[pair] == DIRECT  # a sum says which edges it has
    sums = along(figures, direct, via, np.isfinite(prices))
    for i in range(count):
        for j in range(count):
            reached = i != j and np.isfinite(prices[i, j])
            found = path(via, i, j) if reached else []
            assert sums[i, j] == sum(figures[pair] for pair in itertools.pairwise(found))
