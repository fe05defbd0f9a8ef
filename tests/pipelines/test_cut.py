"""The best cut against all cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.pipelines.cut import Chain, Cut, Layer, best_cut, bounds, least_memory
from fxshard.pipelines.schedule import SCHEDULES, in_flight, stages_of_rank, step_time

SIZES = st.integers(0, 9)
LAYER = st.builds(
    Layer,
    name=st.just("layer"),
    time=st.integers(1, 9),
    held=SIZES,
    gradients=SIZES,
    saved=SIZES,
    working=SIZES,
    entering=st.integers(0, 3),
    transfer=st.integers(0, 4),
    starts=st.sampled_from([True, True, True, False]),
)
CHAIN = st.builds(
    lambda layers, stages, extra, schedule: Chain(tuple(layers), stages * stages_of_rank(schedule), stages * (1 + extra), schedule),
    st.lists(LAYER, min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(SCHEDULES),
)


def cuts(chain: Chain) -> Iterator[Cut]:
    inside = [i for i, layer in enumerate(chain.layers) if i and layer.starts]
    return ((0, *rest) for rest in itertools.combinations(inside, chain.stages - 1))


def took(chain: Chain, cut: Cut) -> float:
    return step_time([chain.time(*ends) for ends in bounds(cut, len(chain.layers))], chain.microbatches, chain.several)


def peak(chain: Chain, cut: Cut) -> int:
    return chain.several * max(chain.memory(i, *ends) for i, ends in enumerate(bounds(cut, len(chain.layers))))


@given(CHAIN, st.one_of(st.integers(0, 120), st.just(math.inf)))
def test_the_best_cut_is_the_best_of_all(chain: Chain, limit: float) -> None:
    fitting = [took(chain, cut) for cut in cuts(chain) if peak(chain, cut) <= limit]
    found = best_cut(chain, limit)
    assert (found is None) == (not fitting)
    if found is not None:
        assert peak(chain, found) <= limit and took(chain, found) == min(fitting)


@given(CHAIN)
def test_the_least_memory_is_that_of_some_cut(chain: Chain) -> None:
    assert least_memory(chain) == min((peak(chain, cut) for cut in cuts(chain)), default=None)


@given(CHAIN)
def test_the_memory_of_a_stage_is_the_peak_of_its_steps(chain: Chain) -> None:
    """Counted event by event: forwards of the microbatches in flight, then a backward, whose gradients are added to the sums at its end."""
    stages = {(i, *ends) for cut in cuts(chain) for i, ends in enumerate(bounds(cut, len(chain.layers)))}
    for i, first, end in sorted(stages):
        layers = chain.layers[first:end]
        flying = in_flight(chain.schedule, i, chain.stages, chain.microbatches)
        now = sum(x.held for x in layers) + (sum(x.gradients for x in layers) if chain.microbatches > 1 else 0)
        now += sum(flying * x.saved for x in layers)
        now += chain.microbatches * sum(chain.layers[k].entering for k in (first, end) if 0 < k < len(chain.layers))
        most = now
        for layer in reversed(layers):
            most = max(most, now + layer.working)
            now += layer.gradients - layer.saved
            most = max(most, now)
        assert chain.memory(i, first, end) == most


def test_1f1b_needs_less_memory_in_later_stages() -> None:
    layers = tuple(Layer(f"layers.{i}", 10.0, held=10, saved=10) for i in range(8))
    assert best_cut(Chain(layers, 2, 4)) == (0, 4)
    assert [Chain(layers, 2, 4).memory(i, 4 * i, 4 * i + 4) for i in (0, 1)] == [120, 80]
    assert best_cut(Chain(layers, 2, 4), 100) == (0, 3)
    assert best_cut(Chain(layers, 2, 4, "GPipe"), 100) is None


def test_a_large_chain_takes_no_time() -> None:
    layers = tuple(Layer(f"layers.{i}", 1.0 + i % 7 / 100, saved=1, transfer=0.1) for i in range(96))
    cut = best_cut(Chain(layers, 8, 32))
    assert cut is not None and len(cut) == 8
    assert took(Chain(layers, 8, 32), cut) == pytest.approx(sum(x.time for x in layers) + 1.4 + 31 * 12.55, rel=0.01)
