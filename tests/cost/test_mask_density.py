"""Scores that flex_attention computes under a mask, as priced while planning: those of the mask evaluated at every score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxshard.cost import mask_density
from fxshard.cost.mask_density import scores_seen
from fxshard.ops.flex.attention import ROWS
from tests.ops.flex.test_functions import text

S = 1024
DOCUMENTS = torch.arange(S) // 200
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 100),
    "both sides": lambda b, h, q, k: (q - k).abs() < 64,
    "documents of 200": lambda b, h, q, k: torch.div(q, 200, rounding_mode="floor") == torch.div(k, 200, rounding_mode="floor"),
    "prefix": lambda b, h, q, k: (k < 300) | (q >= k),
    "windows by head": lambda b, h, q, k: (q >= k) & (q - k < 50 * (h + 1)),
    "a query in 64 sees all": lambda b, h, q, k: (q % 64 == 5) | ((q >= k) & (q - k < 32)),
    "the head in the middle sees all": lambda b, h, q, k: (h == 1) | (q == k),
    "nothing": lambda b, h, q, k: q < 0,
    "everything": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
}


def computed(mask: Callable[..., Any], *tensors: torch.Tensor) -> list[int]:
    """Scores of each block of queries: keys from the first to the last that is seen, by the whole mask of 3 heads."""
    q, k = torch.arange(S)[:, None], torch.arange(S)
    seen = torch.stack([torch.as_tensor(mask(torch.tensor(0), torch.tensor(h), q, k, *tensors)).expand(S, S) for h in range(3)]).any(0)
    used = [block.any(0).nonzero().flatten().tolist() for block in seen.split(ROWS)]
    return [ROWS * (keys[-1] - keys[0] + 1) if keys else 0 for keys in used]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_priced_is_what_is_computed(name: str, ranks: int) -> None:
    """Sharded queries: the rank with most."""
    blocks = computed(MASKS[name])
    each = len(blocks) // ranks
    most = max(sum(blocks[i : i + each]) for i in range(0, len(blocks), each))
    assert scores_seen(text(MASKS[name]), 2, 3, S, S, S // ranks) == most


def test_a_last_block_that_is_shorter() -> None:
    """300 causal queries: 128 see up to 128 keys, 128 up to 256, 44 all 300."""
    assert scores_seen(text(MASKS["causal"]), 1, 1, 300, 300, 300) == pytest.approx(128 * 128 + 128 * 256 + 44 * 300)


def test_a_sample_of_long_sequences() -> None:
    """A window of 512 in 32,768 tokens: 639 keys for a block of 128 queries, but for the first blocks. Causal attention: half."""
    tokens = 32768
    window = text(lambda b, h, q, k: (q >= k) & (q - k < 512))
    assert scores_seen(window, 8, 32, tokens, tokens, tokens) == pytest.approx(639 * tokens, rel=0.02)
    causal = text(lambda b, h, q, k: q >= k)
    assert scores_seen(causal, 8, 32, tokens, tokens, tokens) == pytest.approx(tokens**2 / 2, rel=0.02)
    assert scores_seen(causal, 8, 32, tokens, tokens, tokens // 64) == pytest.approx(tokens**2 / 64, rel=0.02)
    for everything in ("a query in 64 sees all", "the head in the middle sees all"):
        assert scores_seen(text(MASKS[everything]), 8, 32, tokens, tokens, tokens) == pytest.approx(tokens**2, rel=0.02)


def test_a_mask_is_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores at once, whatever the sequence, and a bounded number in all."""
    tokens, sizes = 2**17, list[int]()
    evaluate = mask_density.evaluate

    def counted(mask: str, place: Any) -> Any:
        sizes.append(math.prod(map(len, (index.ravel() for index in place))))
        return evaluate(mask, place)

    monkeypatch.setattr(mask_density, "evaluate", counted)
    by_head = text(lambda b, h, q, k: (q >= k) & (q - k < 64 * (h + 1)))
    assert scores_seen(by_head, 8, 32, tokens, tokens, tokens) == pytest.approx((64 * 32 + 127) * tokens, rel=0.02)
    assert max(sizes) <= 2**22 and sum(sizes) <= 2**26


def test_what_tensors_say_counts_as_seen() -> None:
    """While planning only shapes of tensors are known: documents and causal is causal at most, documents alone is everything."""
    documents = torch.zeros(S, dtype=torch.int64)
    causal = sum(computed(MASKS["causal"]))
    both = text(lambda b, h, q, k, d: (d[q] == d[k]) & (q >= k), documents)
    assert scores_seen(both, 1, 1, S, S, S) == causal >= sum(computed(lambda b, h, q, k, d: (d[q] == d[k]) & (q >= k), DOCUMENTS))
    assert scores_seen(text(lambda b, h, q, k, d: d[q] == d[k], documents), 1, 1, S, S, S) == S * S
    assert scores_seen(text(lambda b, h, q, k, d: (d[q] == d[k]) | (q >= k), documents), 1, 1, S, S, S) == S * S
    inverted = text(lambda b, h, q, k, d: ~((d[q] == d[k]) & (q >= k)), documents)
    assert scores_seen(inverted, 1, 1, S, S, S) >= sum(computed(lambda b, h, q, k, d: ~((d[q] == d[k]) & (q >= k)), DOCUMENTS))
