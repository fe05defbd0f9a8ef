"""A counter-based generator: random numbers as a function of two key words and of an element's index, in int32 arithmetic on tensors.

The same functions run eagerly, on shards, and are what a compiler gets: every result is a function of its element alone, so that
bits are the same however a tensor is cut. 32-bit words are int32 tensors, which wrap; right shifts are masked, for theirs keep the
sign. Transcendental functions are series in sums and products, each rounded as IEEE says: a library's differ between a vector and
the elements left over.

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
"""A word: an int32 tensor or a number in its range; uint32 of numpy for keys."""
Words = tuple[Word, Word]

KEY_ROUNDS, ELEMENT_ROUNDS = 20, 13
"""Rounds of Threefry for keys, and for elements (13 pass Crush, 20 are the safe number; both in the paper)."""
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def word(value: int) -> int:
    """``value`` modulo 2^32 as the number that an int32 holds."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def shifted(x: Any, bits: int) -> Any:
    """The logical right shift."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotated(x: Any, bits: int) -> Any:
    return (x << bits) | shifted(x, 32 - bits)


def threefry(key: Words, counter: Words, rounds: int) -> Words:
    """Threefry2x32 of a counter under a key, word by word."""
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
    x = (x ^ shifted(x, 16)) * word(MULTIPLIERS[0])
    x = (x ^ shifted(x, 15)) * word(MULTIPLIERS[1])
    return x ^ shifted(x, 16)


def keys_of(seed: int, first: int, count: int = 1) -> torch.Tensor:
    """int32 [2, count]: the keys of the draws numbered ``first`` and on, Threefry2x32-20 of the number under a seed of 64 bits."""
    numbers = np.uint64(first) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        found = threefry(_halves(np.uint64(seed)), _halves(numbers), KEY_ROUNDS)
    return torch.from_numpy(np.stack(found).view(np.int32))


def _halves(x: Any) -> tuple[Any, Any]:
    """The low and the high word of 64-bit numbers."""
    return np.uint32(x & np.uint64(0xFFFFFFFF)), np.uint32(x >> np.uint64(32))


def index_of(shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[Any], device: Any) -> Words:
    """The words (low, high) of each element's index in a contiguous tensor of ``shape``, for the block of ``sizes`` at ``offsets``.

    ``high`` is None for a shape of at most 2^32 elements: which form it is depends on the whole alone.
    """
    wide = math.prod(shape) > 1 << 32
    dtype, step, index = torch.int64 if wide else torch.int32, 1, None
    for d in reversed(range(len(shape))):
        place = torch.arange(sizes[d], dtype=dtype, device=device)
        if isinstance(offsets[d], torch.Tensor):
            place = place + offsets[d].to(dtype)
        elif offsets[d]:
            place = place + (offsets[d] if wide else word(offsets[d]))
        if step != 1:
            place = place * (step if wide else word(step))
        place = place.view(-1, *[1] * (len(shape) - 1 - d))
        index = place if index is None else place + index
        step *= shape[d]
    if index is None:
        index = torch.zeros((), dtype=dtype, device=device)
    return ((index & 0xFFFFFFFF).to(torch.int32), (index >> 32).to(torch.int32)) if wide else (index, None)


def hashed(keys: Words, index: Words) -> torch.Tensor:
    """One word an element: two scrambles with the second key word between them, a permutation of each 2^32 elements.

    Beyond 2^32 elements each block of as many has keys of its own.
    """
    low, high = index
    if high is not None:
        keys = threefry(keys, (high, 0), ELEMENT_ROUNDS)
    return scramble(scramble(low ^ keys[0]) + keys[1])


def pairs(keys: Words, index: Words, number: int = 0) -> Words:
    """Two words an element by Threefry2x32-13, the pair of this ``number`` (below 256): words that may repeat, as true ones do."""
    low, high = index
    return threefry(keys, (low, number << 24 if high is None else high + (number << 24)), ELEMENT_ROUNDS)


def kept(keys: Words, index: Words, p: float) -> torch.Tensor:
    """True with probability 1 - p, to 2^-32; never for p = 1."""
    threshold = round(p * (1 << 32)) - (1 << 31)
    if threshold >= 1 << 31:
        return torch.zeros_like(index[0], dtype=torch.bool)
    return hashed(keys, index) >= threshold


def uniform(keys: Words, index: Words, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of the dtype's resolution in [0, 1)."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if bits > 32:
        return _fraction(*pairs(keys, index))
    return (shifted(hashed(keys, index), 32 - bits).to(torch.float32) * 2.0**-bits).to(dtype)


def _fraction(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """53 bits of two words in [0, 1), float64."""
    return (shifted(a, 5).to(torch.float64) * 2.0**26 + shifted(b, 6).to(torch.float64)) * 2.0**-53


def normal(keys: Words, index: Words, dtype: torch.dtype) -> torch.Tensor:
    """Box and Muller's: sqrt(-2 ln u) cos(2 pi v), u in (0, 1]; float32 for half precision."""
    if dtype == torch.float64:
        u, v = 1 - _fraction(*pairs(keys, index)), _fraction(*pairs(keys, index, 1))
        return (-2 * logarithm(u)).sqrt() * cosine(v)
    a, b = pairs(keys, index)
    u = (shifted(a, 8) + 1).to(torch.float32) * 2.0**-24
    return ((-2 * logarithm(u)).sqrt() * cosine(shifted(b, 8).to(torch.float32) * 2.0**-24)).to(dtype)


def whole_numbers(keys: Words, index: Words, low: int, high: int) -> torch.Tensor:
    """int64 in [low, high): 63 bits modulo the range."""
    a, b = pairs(keys, index)
    return wide(a, b) % (high - low) + low


def wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two words as one non-negative int64 of 63 bits."""
    return ((a.to(torch.int64) & 0x7FFFFFFF) << 32) | (b.to(torch.int64) & 0xFFFFFFFF)


@cache
def _terms(dtype: torch.dtype) -> tuple[int, int]:
    """Terms of the series of ln and of cosine and sine after which the next is below the dtype's resolution."""
    eps = torch.finfo(dtype).eps / 4
    square, angle = (3 - 2 * math.sqrt(2)) ** 2, math.pi / 4
    ln = next(k for k in range(1, 40) if square**k / (2 * k + 1) < eps)
    return ln, next(k for k in range(1, 40) if angle ** (2 * k) / math.factorial(2 * k) < eps)


def _series(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Horner's."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def logarithm(u: torch.Tensor) -> torch.Tensor:
    """ln u of normal floating-point numbers: u = 2^e m, m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1))."""
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
    """cos(2 pi t) of t in [0, 1): series of the distance to the nearest quarter turn, which is exact."""
    quarter = (turns * 4 + 0.5).floor()
    angle = (turns * 4 - quarter) * (math.pi / 2)
    square, count = angle * angle, _terms(turns.dtype)[1]
    even = _series(square, [(-1) ** k / math.factorial(2 * k) for k in range(count)])
    odd = angle * _series(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(count)])
    turned = quarter.to(torch.int32)
    value = torch.where((turned & 1) == 0, even, odd)
    return torch.where(((turned + 1) & 2) == 0, value, -value)
