"""How many scores ``fxshard::flex_attention`` computes under a mask, as far as the mask's text says: for its price.

The operator works through blocks of queries, and computes for each the keys from the first to the last that one of them sees. So the
mask is evaluated for the first, middle and last query of a sample of blocks, on all keys, in the first and last batch and head. That is
exact for masks whose edges move with the query: causal ones, windows, prefixes, documents of known length. For others, such as windows with
single queries or heads that see everything, some of these blocks are evaluated at all queries and heads, and what they see besides counts
in all blocks. Of long sequences that is few blocks, then few queries, then few heads (``EVALUATED``): the price may then be too low.

A mask may read tensors, of which only the shapes are known while planning. What depends on them counts as seen, but not what is ``and``
something known: causal documents cost what causal attention costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fxshard.graph.json_values import from_json
from fxshard.ops.flex.attention import ROWS
from fxshard.ops.flex.functions import PLACE, known

BLOCKS = 64
"""Blocks of queries that are sampled, at most."""
EVALUATED = 1 << 25
"""Scores at which a mask is evaluated, at most, for some queries of many blocks and again for all queries of few."""
AT_ONCE = 1 << 21
"""Scores of one evaluation, about: each value of the mask's function takes 16 MiB."""
AND = ("aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.__and__.Tensor")
OR = ("aten.logical_or.default", "aten.bitwise_or.Tensor", "aten.__or__.Tensor")
MAKERS = ("aten.scalar_tensor.default", "aten.full.default", "aten.new_ones.default", "aten.new_zeros.default", "aten._to_copy.default")
"""Operators that are not pointwise, but act on scalars as if they were."""


@dataclass(frozen=True, eq=False)
class _Bound:
    """A value that depends on tensors. ``seen``: what it is at most, if it is a bool and something bounds it."""

    seen: torch.Tensor | None = None


def scores_seen(mask: str, batch: int, heads: int, queries: int, keys: int, shard: int) -> float:
    """Scores [queries of a shard x keys] that are computed for one batch and head, on the rank that computes most.

    ``mask``: the text of the function. ``shard``: queries of each rank, of ``queries`` in all, in order.
    """
    if not shard or not keys:
        return 0.0
    at, seen = _spans(mask, batch, heads, queries, keys)
    rows = np.minimum(queries - at, ROWS)  # the last block may be shorter
    middle = at + rows / 2
    most = 0.0
    for start in range(0, queries, shard):
        inside = (middle >= start) & (middle < start + shard)
        mean = np.average(seen[inside], weights=rows[inside]) if inside.any() else np.interp(start + shard / 2, middle, seen)
        most = max(most, float(mean))
    return shard * most


@lru_cache(maxsize=256)
def _spans(mask: str, batch: int, heads: int, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """(first queries of the sampled blocks, keys from the first to the last that one of their queries sees in any batch and head)."""
    varies = _varies(mask, batch, heads)
    batches, ends = (_spread(count, 2 if by else 1) for count, by in zip((batch, heads), varies, strict=True))
    scores = keys * len(batches)  # of one query and head
    starts = _sample(-(-queries // ROWS), max(1, min(BLOCKS, EVALUATED // (3 * scores * len(ends))))) * ROWS
    seen = _seen(mask, (batches, ends), _queries(starts, queries, 3), keys)
    every = _spread(heads, max(2, EVALUATED // (3 * scores)) if varies[1] else 1)
    few = _sample(len(starts), max(1, EVALUATED // (ROWS * scores * len(every))))
    dense = _queries(starts[few], queries, max(3, min(ROWS, EVALUATED // (scores * len(every)))))
    besides = _seen(mask, (batches, every), dense, keys) - seen[few]
    return starts, np.minimum(seen + np.interp(starts, starts[few], np.maximum(besides, 0)), keys)


def _varies(mask: str, batch: int, heads: int) -> tuple[bool, bool]:
    """Whether what is seen depends on the batch and on the head."""
    found = evaluate(mask, [torch.from_numpy(index) for index in np.ix_(range(min(batch, 2)), range(min(heads, 2)), [0], [0])])
    shape = (1, 1, 1, 1) if found is None or not found.ndim else tuple(found.shape)
    return shape[0] > 1, shape[1] > 1


def _queries(starts: np.ndarray, queries: int, count: int) -> np.ndarray:
    """[blocks, count] queries of each block, the first and the last among them; the last block may repeat some."""
    last = np.minimum(starts + ROWS, queries) - 1
    return starts[:, None] + np.arange(count) * (last - starts)[:, None] // (count - 1)


def _seen(mask: str, which: tuple[np.ndarray, np.ndarray], rows: np.ndarray, keys: int) -> np.ndarray:
    """[blocks] keys from the first to the last that a query of ``rows`` [blocks, queries] sees in one of these (batches, heads)."""
    first, end = np.full(rows.size, keys), np.zeros(rows.size, dtype=np.int64)
    batches, heads = which
    for some in _parts(heads, AT_ONCE // (keys * len(batches))):
        for at in _parts(np.arange(rows.size), AT_ONCE // (keys * len(batches) * len(some))):
            place = np.ix_(batches, some, rows.ravel()[at], np.arange(keys))
            found = evaluate(mask, [torch.from_numpy(index) for index in place])
            if found is None:
                return np.full(len(rows), float(keys))
            seen = found.expand(len(batches), len(some), len(at), keys).any(dim=(0, 1)).numpy()
            any_key = seen.any(axis=1)
            first[at] = np.minimum(first[at], np.where(any_key, seen.argmax(axis=1), keys))
            end[at] = np.maximum(end[at], np.where(any_key, keys - seen[:, ::-1].argmax(axis=1), 0))
    return np.maximum(end.reshape(rows.shape).max(axis=1) - first.reshape(rows.shape).min(axis=1), 0).astype(np.float64)


def _parts(numbers: np.ndarray, size: int) -> list[np.ndarray]:
    return np.split(numbers, range(max(size, 1), len(numbers), max(size, 1)))


def _spread(count: int, most: int) -> np.ndarray:
    """At most ``most`` of ``count`` numbers, at equal distances, with the first and, if there are two or more, the last."""
    parts = min(count, most)
    return np.arange(parts) * (count - 1) // max(parts - 1, 1)


def _sample(count: int, most: int) -> np.ndarray:
    """At most ``most`` of ``count`` numbers, in the middles of equal parts."""
    parts = min(count, most)
    return ((np.arange(parts) + 0.5) * count / parts).astype(np.int64)


def evaluate(mask: str, place: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Whether scores at ``place`` (batch, head, query, key: of shapes that broadcast) may be seen; None if tensors alone decide, or an
    operator does not act on each score by itself."""
    count, calls, result = json.loads(mask)
    values: list[Any] = [*place, *[_Bound()] * (count - PLACE)]
    try:
        for name, args, kwargs in calls:
            values.append(_called(known(name), from_json(args, values), from_json(kwargs, values)))
    except (RuntimeError, TypeError, ValueError, IndexError):  # an operator on scalars that takes no larger tensors
        return None
    found = values[result]
    found = found.seen if isinstance(found, _Bound) else found
    return found.bool() if isinstance(found, torch.Tensor) else None


def _called(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flat = [one for value in (*args, *kwargs.values()) for one in (value if isinstance(value, list | tuple) else (value,))]
    if not any(isinstance(one, _Bound) for one in flat):
        return target(*args, **kwargs) if torch.Tag.pointwise in target.tags or str(target) in MAKERS else _Bound()
    bounds = [one.seen if isinstance(one, _Bound) else one for one in args]
    bools = [one for one in bounds if isinstance(one, torch.Tensor) and one.dtype == torch.bool]
    if str(target) in (*AND, *OR) and len(bools) == len(args):
        return _Bound(target(*bools))
    return _Bound(bools[0] if str(target) in AND and bools else None)
