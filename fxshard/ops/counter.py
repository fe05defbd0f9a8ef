"""A counter-based random number generator: numbers are functions of two key words and an element's index, in int32 tensor arithmetic.

The same functions run eagerly, on shards and under a compiler: each number depends on its element only, so sharding does not
change its bits. 32-bit words are int32 tensors, which wrap around; right shifts are masked, because those of int32 extend the
sign. Transcendental functions are series of IEEE sums and products, because a library's vectorised loops and remainder loops may
differ in the last bit.

torch's counter-based operators have no CPU kernels, and numpy's Philox cannot be traced: decision 0043.

- ``threefry``: Threefry2x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
- ``scramble``: lowbias32 (Wellons, Prospecting for hash functions, 2018), a bijection of words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

Word = Any
"""A word: an int32 tensor or a Python integer in its range; numpy's uint32 for keys."""
Words = tuple[Word, Word]

KEY_ROUNDS, ELEMENT_ROUNDS = 20, 13
"""Rounds of Threefry for keys and for elements (per the paper, 13 pass Crush and 20 have a safety margin)."""
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def to_int32(value: int) -> int:
    """``value`` modulo 2^32, as a signed 32-bit integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def logical_shift(x: Any, bits: int) -> Any:
    """The logical right shift."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotated(x: Any, bits: int) -> Any:
    return (x << bits) | logical_shift(x, 32 - bits)


def threefry(key: Words, counter: Words, rounds: int) -> Words:
    """Threefry2x32 of a counter under a key, elementwise."""
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(rounds):
        x = x + y
        y = _rotated(y, ROTATIONS[i % 8]) ^ x
        if i % 4 == 3:
            k = i // 4 + 1
            x, y = x + keys[k % 3], y + keys[(k + 1) % 3] + k
    return x, y


def scramble(x: torch.Tensor) -> torch.Tensor:
    """lowbias32: each bit of the result depends on each bit of ``x``."""
    x = (x ^ logical_shift(x, 16)) * to_int32(MULTIPLIERS[0])
    x = (x ^ logical_shift(x, 15)) * to_int32(MULTIPLIERS[1])
    return x ^ logical_shift(x, 16)


def keys_of(seed: int, first: int, count: int = 1) -> torch.Tensor:
    """int32 [2, count]: the keys of ``count`` draws from number ``first`` on: Threefry2x32-20 of the draw's number under a 64-bit seed."""
    numbers = np.uint64(first) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        found = threefry(_halves(np.uint64(seed)), _halves(numbers), KEY_ROUNDS)
    return torch.from_numpy(np.stack(found).view(np.int32))


def keys_of_tensor(seed: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """``keys_of`` a seed that is known when the code runs, an int64 scalar, in tensor arithmetic: for code without Python."""
    low, high = (seed & 0xFFFFFFFF).to(torch.int32), (seed >> 32).to(torch.int32)
    numbers = torch.arange(first, first + count, dtype=torch.int32, device=seed.device)
    return torch.stack(threefry((low, high), (numbers, torch.zeros_like(numbers)), KEY_ROUNDS))


def _halves(x: Any) -> tuple[Any, Any]:
    """The low and the high word of 64-bit numbers."""
    return np.uint32(x & np.uint64(0xFFFFFFFF)), np.uint32(x >> np.uint64(32))


def index_of(shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[Any], device: Any) -> Words:
    """The words (low, high) of each element's index in a contiguous tensor of ``shape``, for the block of ``sizes`` at ``offsets``.

    ``high`` is None if ``shape`` has at most 2^32 elements; this depends on the global shape only. With symbolic sizes of inner dims, sums
    are computed in int64, since the low word of a symbolic step is no expression of sizes.
    """
    narrow = math.prod(shape) <= 1 << 32
    wide = not narrow or not all(isinstance(size, int) for size in shape[1:])
    dtype, step, index = torch.int64 if wide else torch.int32, 1, None
    for d in reversed(range(len(shape))):
        place = torch.arange(sizes[d], dtype=dtype, device=device)
        if isinstance(offsets[d], torch.Tensor):
            place = place + offsets[d].to(dtype)
        elif offsets[d]:
            place = place + (offsets[d] if wide else to_int32(offsets[d]))
        if not isinstance(step, int) or step != 1:
            place = place * (step if wide else to_int32(step))
        place = place.view(-1, *[1] * (len(shape) - 1 - d))
        index = place if index is None else place + index
        step *= shape[d]
    if index is None:
        index = torch.zeros((), dtype=dtype, device=device)
    low = (index & 0xFFFFFFFF).to(torch.int32) if wide else index
    return low, None if narrow else (index >> 32).to(torch.int32)


def hashed(keys: Words, index: Words) -> torch.Tensor:
    """One word per element: two scrambles with the second key word added between them, a bijection on 2^32 elements.

    Beyond 2^32 elements, each block of 2^32 has its own keys.
    """
    low, high = index
    if high is not None:
        keys = threefry(keys, (high, 0), ELEMENT_ROUNDS)
    return scramble(scramble(low ^ keys[0]) + keys[1])


def threefry_pair(keys: Words, index: Words, number: int = 0) -> Words:
    """Pair ``number`` (below 256) of words per element, by Threefry2x32-13; unlike ``hashed``, words may repeat, as random ones do."""
    low, high = index
    return threefry(keys, (low, number << 24 if high is None else high + (number << 24)), ELEMENT_ROUNDS)


def keep_mask(keys: Words, index: Words, p: float) -> torch.Tensor:
    """True with probability 1 - p, rounded to 2^-32; never True for p = 1."""
    threshold = round(p * (1 << 32)) - (1 << 31)
    if threshold >= 1 << 31:
        return torch.zeros_like(index[0], dtype=torch.bool)
    return hashed(keys, index) >= threshold


def uniform(keys: Words, index: Words, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of the dtype's resolution in [0, 1)."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if bits > 32:
        return _fraction(*threefry_pair(keys, index))
    return (logical_shift(hashed(keys, index), 32 - bits).to(torch.float32) * 2.0**-bits).to(dtype)


def _fraction(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A float64 in [0, 1) from 53 bits of two words."""
    return (logical_shift(a, 5).to(torch.float64) * 2.0**26 + logical_shift(b, 6).to(torch.float64)) * 2.0**-53


def normal(keys: Words, index: Words, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers by Box-Muller: sqrt(-2 ln u) cos(2 pi v), u in (0, 1]; computed in float32 for half precision."""
    if dtype == torch.float64:
        u, v = 1 - _fraction(*threefry_pair(keys, index)), _fraction(*threefry_pair(keys, index, 1))
        return (-2 * logarithm(u)).sqrt() * cosine(v)
    a, b = threefry_pair(keys, index)
    u = (logical_shift(a, 8) + 1).to(torch.float32) * 2.0**-24
    return ((-2 * logarithm(u)).sqrt() * cosine(logical_shift(b, 8).to(torch.float32) * 2.0**-24)).to(dtype)


def integers(keys: Words, index: Words, low: int, high: int) -> torch.Tensor:
    """int64 in [low, high): 63 random bits modulo the size of the range."""
    a, b = threefry_pair(keys, index)
    return join_words(a, b) % (high - low) + low


def join_words(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two words as one non-negative int64 of 63 bits."""
    return ((a.to(torch.int64) & 0x7FFFFFFF) << 32) | (b.to(torch.int64) & 0xFFFFFFFF)


@cache
def _terms(dtype: torch.dtype) -> tuple[int, int]:
    """Numbers of terms of the series of ln, and of cosine and sine, after which terms are below the dtype's resolution."""
    eps = torch.finfo(dtype).eps / 4
    square, angle = (3 - 2 * math.sqrt(2)) ** 2, math.pi / 4
    ln = next(k for k in range(1, 40) if square**k / (2 * k + 1) < eps)
    return ln, next(k for k in range(1, 40) if angle ** (2 * k) / math.factorial(2 * k) < eps)


def _series(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """The polynomial with these coefficients, by Horner's scheme."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def logarithm(u: torch.Tensor) -> torch.Tensor:
    """ln u for normal (not subnormal) u: u = 2^e m, m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1))."""
    double = u.dtype == torch.float64
    integer, digits = (torch.int64, 52) if double else (torch.int32, 23)
    (root,) = struct.unpack("<q" if double else "<i", struct.pack("<d" if double else "<f", math.sqrt(0.5)))
    bits = u.view(integer) - root
    exponent = (bits >> digits).to(u.dtype)
    m = ((bits & ((1 << digits) - 1)) + root).view(u.dtype)
    s = (m - 1) / (m + 1)
    square = s * s
    return exponent * math.log(2) + 2 * s * _series(square, [1 / (2 * k + 1) for k in range(_terms(u.dtype)[0])])


def cosine(turns: torch.Tensor) -> torch.Tensor:
    """cos(2 pi t) for t in [0, 1), by a series in the distance to the nearest quarter turn; that distance is exact."""
    quarter = (turns * 4 + 0.5).floor()
    angle = (turns * 4 - quarter) * (math.pi / 2)
    square, count = angle * angle, _terms(turns.dtype)[1]
    even = _series(square, [(-1) ** k / math.factorial(2 * k) for k in range(count)])
    odd = angle * _series(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(count)])
    turned = quarter.to(torch.int32)
    value = torch.where((turned & 1) == 0, even, odd)
    return torch.where(((turned + 1) & 2) == 0, value, -value)
