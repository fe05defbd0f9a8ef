"""The counter-based generator: published results, its definition in Python integers, and indexes beyond 32 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fxshard.ops import counter
from fxshard.ops.random import draw, draw_shard

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344))

KNOWN = {  # Random123, kat_vectors: rounds, counter, key, result
    "13 zeros": (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    "13 ones": (13, (MASK, MASK), (MASK, MASK), (0xFD36D048, 0x2D17272C)),
    "13 pi": (13, *PI, (0xBA3E4725, 0xF27D669E)),
    "20 zeros": (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    "20 ones": (20, (MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    "20 pi": (20, *PI, (0xC4923A9C, 0x483DF7A0)),
}


def tensors(words: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(counter.to_int32(w), dtype=torch.int32) for w in words)  # type: ignore[return-value]


def numbers(words: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    return tuple(int(w) & MASK for w in words)  # type: ignore[return-value]


@pytest.mark.parametrize(("rounds", "at", "key", "result"), KNOWN.values(), ids=KNOWN)
def test_threefry_gives_the_published_words(rounds: int, at: tuple[int, int], key: tuple[int, int], result: tuple[int, int]) -> None:
    assert numbers(counter.threefry(tensors(key), tensors(at), rounds)) == result
    if rounds == counter.KEY_ROUNDS:  # a key is Threefry of the draw's number with the seed as key, low words first
        seed, number = (w[0] | w[1] << 32 for w in (key, at))
        assert tuple(int(w) & MASK for w in counter.keys_of(seed, number)[:, 0]) == result


@pytest.mark.parametrize("seed", [0, 1, 77, 2**31, 2**32 - 1, 2**61 + 12345, 2**62 - 1])
def test_keys_by_tensors_have_the_same_bits(seed: int) -> None:
    for first, count in ((0, 1), (5, 3), (1000, 2)):
        assert torch.equal(counter.keys_of_tensor(torch.tensor(seed), first, count), counter.keys_of(seed, first, count))


def test_keys_of_several_draws_are_those_of_each() -> None:
    first = (1 << 32) - 2  # the high word of the number changes between these draws
    several = counter.keys_of(77, first, 4)
    assert torch.equal(several, torch.cat([counter.keys_of(77, first + i) for i in range(4)], 1))


def test_the_published_inverse_undoes_a_scramble() -> None:
    """The inverse of lowbias32, published by its author."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    x = counter.scramble(torch.from_numpy(words.view(np.int32).copy())).numpy().view(np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x43021123)
    x = (x ^ (x >> 15) ^ (x >> 30)) * np.uint32(0x1D69E2A5)
    assert np.array_equal(x ^ (x >> 16), words)


def scrambled(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) & MASK
    return x ^ x >> 16


def test_a_mask_against_python_integers() -> None:
    keys = (0x12345678, 0x9ABCDEF0)
    have = counter.hashed(tensors(keys), counter.index_of((9, 7), (4, 5), (3, 2), CPU))
    want = [[scrambled((scrambled(((3 + i) * 7 + 2 + j) ^ keys[0]) + keys[1]) & MASK) for j in range(5)] for i in range(4)]
    assert (have.long() & MASK).tolist() == want
    kept = counter.keep_mask(tensors(keys), counter.index_of((9, 7), (9, 7), (0, 0), CPU), 0.3)
    words = counter.hashed(tensors(keys), counter.index_of((9, 7), (9, 7), (0, 0), CPU)).double() + 2**31
    assert torch.equal(kept, words >= 0.3 * 2**32)


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 14), (3, 1 << 33), (5, 1 << 31, 3)])
def test_indexes_beyond_32_bits(shape: tuple[int, ...]) -> None:
    sizes = tuple(min(s, 3) for s in shape)
    for offsets in ([0] * len(shape), [s - n for s, n in zip(shape, sizes, strict=True)]):
        low, high = counter.index_of(shape, sizes, [torch.tensor(o) for o in offsets], CPU)
        for at in np.ndindex(*sizes):
            index = 0
            for place, offset, size in zip(at, offsets, shape, strict=True):
                index = index * size + offset + int(place)
            assert (int(low[at]) & MASK, int(high[at])) == (index & MASK, index >> 32)


def test_blocks_of_a_huge_tensor_are_drawn_alone_and_differ() -> None:
    shape, keys = (4, 1 << 32), tensors((5, 6))
    for kind, dtype in (("kept", torch.bool), ("uniform", torch.float32), ("normal", torch.float64), ("integers", torch.int64)):
        rows = draw_shard(kind, 0.5 if kind == "kept" else 0, 1000, shape, dtype, keys, (4, 64), (0, 0), CPU)
        last = draw_shard(kind, 0.5 if kind == "kept" else 0, 1000, shape, dtype, keys, (1, 30), (3, 20), CPU)
        assert torch.equal(last[0], rows[3, 20:50])
        assert not any(torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))


def test_masks_that_keep_nothing_and_everything() -> None:
    seed = torch.tensor(1)
    assert draw("kept", 0.0, 0, [1000], torch.bool, seed, 0).all() and draw("kept", 1e-12, 0, [1000], torch.bool, seed, 0).all()
    assert not draw("kept", 1.0, 0, [1000], torch.bool, seed, 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    drawn = draw("uniform", 0, 0, [1 << 20], dtype, torch.tensor(1), 0)
    assert drawn.min() >= 0 and drawn.max() < 1 and drawn.dtype == dtype
    steps = drawn.double() / (torch.finfo(dtype).eps / 2)
    assert torch.equal(steps, steps.round()) and (dtype == torch.float64 or (steps % 2 == 1).double().mean() > 0.49)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithm_and_cosine_are_exact(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    u = torch.cat([2.0 ** -torch.arange(0, 40, dtype=dtype), torch.linspace(1e-6, 1, 10_001, dtype=dtype)])
    np.testing.assert_allclose(counter.logarithm(u).double(), np.log(u.double().numpy()), rtol=6 * eps, atol=eps * 1e-2)
    t = torch.linspace(0, 1, 10_001, dtype=dtype)[:-1]
    np.testing.assert_allclose(counter.cosine(t).double(), np.cos(2 * math.pi * t.double().numpy()), rtol=0, atol=4 * eps)
