"""Functions of a score's place as text: they compute the same, everywhere at once, and only functional operators of aten get in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxshard._torch_compat.flex_attention import graph_of_mod
from fxshard.graph.json_values import NotSerializable
from fxshard.ops.flex import attention
from fxshard.ops.flex.functions import everywhere, function_of, function_text, is_identity, place_of

SIZES = (2, 3, 4, 5)
ROW = torch.arange(40, dtype=torch.float64).view(2, 20)


def text(function: Callable[..., Any], *tensors: torch.Tensor, of_score: bool = False) -> str:
    """The text of a mask function, or of a score function, that reads ``tensors``."""
    score = [torch.zeros((), dtype=torch.float64)] if of_score else []
    return function_text(graph_of_mod(function, [*score, *(torch.zeros((), dtype=torch.int64) for _ in range(4)), *tensors]))


MASKS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "arithmetic": (lambda b, h, q, k: (q - k).abs() < h + b, ()),
    "table": (lambda b, h, q, k, t: t[b, q * 5 + k] > 10 * h, (ROW,)),
    "rows of a table": (lambda b, h, q, k, t: t[b][q] == t[b][k], (ROW,)),
    "constant": (lambda b, h, q, k: torch.where(q > k, torch.tensor(1.5), 0.0) > 1, ()),
    "all": (lambda b, h, q, k: q.new_ones((), dtype=torch.bool), ()),
    "infinite": (lambda b, h, q, k: torch.where(q > k, -float("inf"), 1.0) > 0, ()),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_function_everywhere(name: str) -> None:
    function, tensors = MASKS[name]
    offsets = (torch.tensor(0), None, torch.tensor(0), None)
    found = everywhere(function_of(text(function, *tensors)), 0, len(tensors))(*place_of(SIZES, offsets, torch.device("cpu")), *tensors)
    assert found.shape == SIZES
    for place in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 3, 1), (0, 2, 1, 3)):
        assert bool(found[place]) == bool(function(*map(torch.tensor, place), *tensors)), place


def test_a_mask_is_as_wide_as_what_it_depends_on() -> None:
    for function, shape in (
        (lambda b, h, q, k: q > k, (1, 1, 4, 5)),
        (lambda b, h, q, k: q + b > k, (2, 1, 4, 5)),
        (lambda b, h, q, k: q > h, (1, 3, 4, 5)),
    ):
        found = everywhere(function_of(text(function)), 0, 0)(*place_of(SIZES, (None,) * 4, torch.device("cpu")))
        assert attention._narrow(found).shape == shape


def test_fewer_queries_at_once_if_keys_are_many() -> None:
    q, few, many = (torch.empty(2, 16, size, 1, device="meta") for size in (512, 1000, 2**15))
    assert (attention._rows(q, few), attention._rows(q, many)) == (attention.ROWS, 32)


def test_places_of_a_shard() -> None:
    whole = place_of(SIZES, (None,) * 4, torch.device("cpu"))
    part = place_of((1, 2, 2, 5), (torch.tensor(1), torch.tensor(1), torch.tensor(2), None), torch.device("cpu"))
    assert [p.tolist() for p in part] == [whole[0].tolist()[1:], whole[1].tolist()[1:], whole[2].tolist()[2:], whole[3].tolist()]


def test_scores() -> None:
    scores = torch.randn(SIZES, dtype=torch.float64)
    changed = text(lambda s, b, h, q, k: s * 2 + h, of_score=True)
    found = everywhere(function_of(changed), 1, 0)(scores, *place_of(SIZES, (None,) * 4, torch.device("cpu")))
    torch.testing.assert_close(found, scores * 2 + torch.arange(3)[:, None, None])
    assert not is_identity(changed)
    assert is_identity(text(lambda s, b, h, q, k: s, of_score=True))


def test_a_text_names_no_device() -> None:
    assert "device" not in text(lambda b, h, q, k: torch.arange(3, device=q.device)[k % 3] > q)


@pytest.mark.parametrize(
    "name", ["aten.rand.default", "aten.add_.Tensor", "fxshard.sdpa.default", "aten.no_such.default", "os.system", "_operator.getitem"]
)
def test_texts_with_other_calls_are_refused(name: str) -> None:
    """A text comes from a file."""
    with pytest.raises(NotSerializable):
        function_of(f'[4,[["torch.ops.{name}",[{{"node":0}}],{{"dict":{{}}}}]],4]')


def test_random_functions_are_refused() -> None:
    with pytest.raises(NotSerializable, match="random"):
        text(lambda b, h, q, k: torch.rand(()) > 0.5)
