"""Draws have the right distributions, by scipy's tests. Seeds are fixed, so that p-values never change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fxshard.ops import counter
from fxshard.ops.random import draw

SURE = 1e-4
"""A p-value below it fails. There are some sixty tests, and no seed was selected."""


def uniform(call: int, *shape: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return draw("uniform", 0, 0, shape, dtype, torch.tensor(2026), call).double().numpy()


def words(seed: int, n: int) -> np.ndarray:
    """The first n words of the generator behind masks, unsigned."""
    keys = tuple(counter.keys_of(seed, 0)[:, 0].unbind())
    return counter.hashed(keys, counter.index_of((n,), (n,), (0,), torch.device("cpu"))).numpy().view(np.uint32)


@pytest.mark.parametrize("seed", range(4))
def test_each_byte_of_a_word_is_uniform(seed: int) -> None:
    drawn = words(seed, 1 << 18)
    for shift in (0, 8, 16, 24):
        assert stats.chisquare(np.bincount(drawn >> shift & 0xFF, minlength=256)).pvalue > SURE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_and_normal_by_the_kolmogorov_smirnov_test(dtype: torch.dtype) -> None:
    for call in range(4):
        assert stats.kstest(uniform(call, 100_000, dtype=dtype), "uniform").pvalue > SURE
        normal = draw("normal", 0, 0, [100_000], dtype, torch.tensor(2026), call).double().numpy()
        assert stats.kstest(normal, "norm").pvalue > SURE
        assert abs(stats.zscore(normal)).max() > 3.9, "the tails must occur"


def test_moments() -> None:
    x = uniform(0, 1 << 20)
    for k in range(1, 7):  # E x^k = 1 / (k + 1)
        deviation = np.sqrt((1 / (2 * k + 1) - 1 / (k + 1) ** 2) / x.size)
        assert abs((x**k).mean() - 1 / (k + 1)) < 4 * deviation
    z = draw("normal", 0, 0, [1 << 20], torch.float32, torch.tensor(2026), 0).double().numpy()
    for k, moment, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105)):
        assert abs((z**k).mean() - moment) < 4 * np.sqrt((square - moment**2) / z.size)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_and_gaps_are_geometric(p: float) -> None:
    kept = draw("kept", p, 0, [1 << 20], torch.bool, torch.tensor(2026), 1).numpy()
    assert stats.binomtest(int(kept.sum()), kept.size, 1 - p).pvalue > SURE
    gaps = np.diff(np.flatnonzero(kept))  # P(gap = k) = (1 - p) p^(k - 1)
    most = 1 + int(np.log(20 / gaps.size) / np.log(p))
    expected = gaps.size * (1 - p) * p ** np.arange(most - 1)
    counts = np.bincount(np.minimum(gaps, most), minlength=most + 1)[1:]
    assert stats.chisquare(counts, [*expected, gaps.size - expected.sum()]).pvalue > SURE


def test_neighbours_rows_and_draws_are_not_correlated() -> None:
    rows = uniform(0, 64, 4096) - 0.5
    flat, bound = rows.ravel(), 5 / np.sqrt(rows.size)
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 4096, 65536):
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < bound
    between = np.corrcoef(rows)[np.triu_indices(64, 1)]
    assert abs(between).max() < 5.5 / 64 and abs(between.mean()) < 5 / 64 / np.sqrt(between.size)
    draws = np.stack([uniform(call, 4096) for call in range(64)])
    assert abs(np.corrcoef(draws)[np.triu_indices(64, 1)]).max() < 5.5 / 64
    assert abs(np.corrcoef(flat, uniform(1, 64, 4096).ravel())[0, 1]) < bound


def test_one_bit_of_index_or_key_changes_half_of_the_bits() -> None:
    index = torch.arange(20_000, dtype=torch.int32) * 7919
    first, second = counter.keys_of(3, 0)[:, 0].unbind()
    before = counter.hashed((first, second), (index, None)).numpy()
    for bit in range(32):
        one = counter.to_int32(1 << bit)
        changed = {
            "index": ((first, second), index ^ one),
            "first": ((first ^ one, second), index),
            "second": ((first, second ^ one), index),
        }
        for keys, at in changed.values():
            flips = (before ^ counter.hashed(keys, (at, None)).numpy()).view(np.uint32)
            rates = [(flips >> b & 1).mean() for b in range(32)]
            assert min(rates) > 0.47 and max(rates) < 0.53


def test_integers_are_uniform() -> None:
    for low, high in ((0, 10), (-3, 94), (2**40, 2**40 + 7)):
        drawn = draw("integers", low, high, [1 << 17], torch.int64, torch.tensor(2026), 2).numpy()
        assert drawn.min() == low and drawn.max() == high - 1
        assert stats.chisquare(np.bincount(drawn - low)).pvalue > SURE


def test_permutations_are_uniform() -> None:
    drawn = [tuple(draw("permutation", 0, 0, [4], torch.int64, torch.tensor(seed), 0).tolist()) for seed in range(6000)]
    counts = [drawn.count(order) for order in itertools.permutations(range(4))]
    assert sum(counts) == 6000 and stats.chisquare(counts).pvalue > SURE
