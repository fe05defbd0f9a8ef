"""Costs of collective algorithms against numbers computed by hand, and properties that hold on any hardware."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fxshard.cost import collective_time
from fxshard.cost.collectives import algorithms, hops, sent_fraction
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.mesh.hardware import Curve, Efficiency, Hardware, Link, Measured
from fxshard.mesh.mesh import Mesh, Span

IN, OUT = Link(1e10, 1.0), Link(1e9, 10.0)
H = Hardware("round", {4: 1e12}, 1e11, 5.0, 4, IN, OUT)
"""Nodes of four: 10 GB/s and 1 us inside, 1 GB/s a rank and 10 us between."""
MB = 1_000_000


def by_name(kind: str, span: Span) -> dict[str, float]:
    """Microseconds of each algorithm on a buffer of a megabyte."""
    return {form.name: form.time(MB) for form in algorithms(kind, span, IN, OUT)}


def test_inside_a_node_there_is_only_the_ring() -> None:
    """Four ranks: 6 hops and 1.5 MB at 10 GB/s, or 3 hops and 0.75 MB."""
    assert by_name("all_reduce", Span(4, 1, 4)) == pytest.approx({"ring": 6 + 150})
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert by_name(kind, Span(4, 1, 4)) == pytest.approx({"ring": 3 + 75})


def test_between_nodes_a_tree_saves_hops_and_sends_more() -> None:
    """Eight ranks in nodes of their own: 14 hops and 1.75 MB by the ring, 2 x 3 hops and 2 MB by the tree, at 1 GB/s."""
    assert by_name("all_reduce", Span(8, 4, 1)) == pytest.approx({"ring": 140 + 1750, "tree": 60 + 2000})
    assert by_name("all_gather", Span(8, 4, 1)) == pytest.approx({"ring": 70 + 875})
    mesh = Mesh({"a": 8, "b": 4}, H)
    assert collective_time("all_reduce", 0, 1750, mesh) == pytest.approx(5 + 60 + 2), "a kilobyte goes by the tree"
    assert collective_time("all_reduce", 0, 1750 * 1000, mesh) == pytest.approx(5 + 140 + 1750), "a megabyte by the ring"


def test_across_nodes_the_stages_of_a_hierarchical_algorithm_add_up() -> None:
    """Two ranks in each of eight nodes: reduce-scatter of 1 MB inside (1 hop, 50 us), all-reduce of half of it between, all-gather.

    Straight through all 16: 30 hops, 14 of them between; 1.875 MB by two rings of 1 GB/s each.
    """
    found = by_name("all_reduce", Span(16, 2, 2))
    assert found["ring"] == pytest.approx(14 * 10 + 16 * 1 + 1875 / 2)
    assert found["tree"] == pytest.approx(2 * (1 + 3 * 10) + 2000 / 2)
    assert found["hierarchical, ring"] == pytest.approx(2 * (1 + 50) + 14 * 10 + 1750 / 2)
    assert found["hierarchical, tree"] == pytest.approx(2 * (1 + 50) + 6 * 10 + 2000 / 2)


def test_gathers_and_exchanges_across_nodes() -> None:
    """As above. An all-to-all sends 1 MB / 16 to each of the 14 ranks in other nodes, over the rank's own share of the network."""
    for kind in ("all_gather", "reduce_scatter"):
        found = by_name(kind, Span(16, 2, 2))
        assert found == pytest.approx({"ring": 7 * 10 + 8 * 1 + 937.5 / 2, "hierarchical, ring": 1 + 50 + 7 * 10 + 875 / 2})
    found = by_name("all_to_all", Span(16, 2, 2))
    assert found == pytest.approx({"ring": 1 + 14 * 10 + 875, "hierarchical, ring": 1 + 50 + 7 * 10 + 875})


def test_network_cards_of_a_node_together_are_as_fast_as_nvlink() -> None:
    """16 H100s in two nodes: eight network cards of 50 GB/s are no bottleneck, so a large all-gather runs at the 370 GB/s of NVLink."""
    sent = 15 * 10**9 // 16
    mesh = Mesh({"tp": 16}, "h100")
    assert collective_time("all_gather", 0, sent, mesh) == pytest.approx(sent / 370e9 * 1e6, rel=0.05)


links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 100))
pairs = st.tuples(links, links).map(lambda p: (Link(max(p[0].bandwidth, p[1].bandwidth), min(p[0].latency, p[1].latency)), p[1]))
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@settings(max_examples=300)
@given(pairs, shapes, st.integers(1, 12), st.sampled_from(COLLECTIVES), st.integers(0, 2), st.integers(0, 10**10), st.integers(0, 10**9))
def test_no_worse_than_one_ring_over_the_slowest_link(
    pair: tuple[Link, Link], shape: list[int], node: int, kind: str, axis: int, sent: int, more: int
) -> None:
    """On any mesh. Also, it is never faster than the faster link, and more bytes never cost less."""
    inside, between = pair
    mesh = Mesh({f"a{i}": n for i, n in enumerate(shape)}, Hardware("any", {4: 1.0}, 1.0, 2.0, node, inside, between))
    axis = axis % mesh.ndim
    n, time = mesh.shape[axis], collective_time(kind, axis, sent, mesh)
    slowest = mesh.link(axis)
    if n == 1:
        assert time == 0
        return
    slack = 1 + 1e-9
    assert time <= (2 + hops(kind, n) * slowest.latency + sent / slowest.bandwidth * 1e6) * slack
    assert time * slack >= 2 + sent / sent_fraction(kind, n) / inside.bandwidth * sent_fraction(kind, 2) * 1e6 / slack
    assert collective_time(kind, axis, sent + more, mesh) >= time


def test_a_link_given_for_an_axis_replaces_that_of_the_hardware() -> None:
    """Inside a node and across nodes; other axes keep their links."""
    mesh, slow = Mesh({"dp": 2, "tp": 4}, H, links={"tp": Link(1e8, 7.0)}), Link(1e8, 7.0)
    assert mesh.link(1) == slow and mesh.hardware.axes == {"tp": slow}
    assert collective_time("all_gather", 1, MB, mesh) == pytest.approx(5 + 3 * 7 + 10_000)
    assert collective_time("all_gather", 0, MB, mesh) == collective_time("all_gather", 0, MB, Mesh({"dp": 2, "tp": 4}, H))
    assert mesh != Mesh({"dp": 2, "tp": 4}, H)


def test_a_measured_group_has_the_measured_time() -> None:
    """Groups match by size and stride, not by the name of the axis; other groups and kinds keep the formula."""
    curve = Curve(((1000, 80.0), (2000, 100.0)))
    own = dataclasses.replace(H, measured=Measured(collectives={("all_reduce", 4, 2): curve}))
    mesh = Mesh({"dp": 4, "tp": 2}, own)
    assert collective_time("all_reduce", 0, 1500, mesh) == pytest.approx(90)
    assert collective_time("all_reduce", 0, 4000, mesh) == pytest.approx(140)
    assert collective_time("all_gather", 0, 1500, mesh) == collective_time("all_gather", 0, 1500, Mesh({"dp": 4, "tp": 2}, H))
    assert collective_time("all_reduce", 1, 1500, mesh) == collective_time("all_reduce", 1, 1500, Mesh({"dp": 4, "tp": 2}, H))


def test_measured_efficiency_of_a_kind() -> None:
    """All-gathers reach twice the latency and half the bandwidth. A link given for an axis is used as it is, without measurements."""
    measured = Measured(collectives={("all_gather", 4, 1): Curve(((8, 1.0), (16, 2.0)))}, efficiency={"all_gather": Efficiency(2.0, 0.5)})
    own = dataclasses.replace(H, measured=measured)
    assert collective_time("all_gather", 0, MB, Mesh({"a": 3}, own)) == pytest.approx(5 + 2 * 2 + 200)
    assert collective_time("reduce_scatter", 0, MB, Mesh({"a": 3}, own)) == pytest.approx(5 + 2 + 100)
    for n in (3, 4):
        mesh = Mesh({"a": n}, own, links={"a": Link(1e8, 7.0)})
        assert collective_time("all_gather", 0, MB, mesh) == pytest.approx(5 + (n - 1) * 7 + 10_000)
