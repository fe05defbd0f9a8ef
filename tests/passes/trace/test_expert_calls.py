"""Of transformers' functions that run experts, its own grouped product is replaced while a model is captured, and a user's is not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.integrations import moe

from fxshard.passes.trace.expert_calls import ENTRY, expert_calls

TABLE: Any = moe.ALL_EXPERTS_FUNCTIONS


def test_transformers_own_function_is_replaced_and_comes_back() -> None:
    given = TABLE[ENTRY]
    with expert_calls():
        assert TABLE[ENTRY] is not given
    assert TABLE[ENTRY] is given


def test_a_function_of_the_user_stays() -> None:
    def own(*args: Any) -> Any:
        return args

    before = TABLE[ENTRY]
    TABLE[ENTRY] = own
    try:
        with expert_calls():
            assert TABLE[ENTRY] is own
        assert TABLE[ENTRY] is own
    finally:
        del TABLE[ENTRY]
    assert TABLE[ENTRY] is before


def test_it_comes_back_after_an_error() -> None:
    given = TABLE[ENTRY]
    with pytest.raises(RuntimeError), expert_calls():
        raise RuntimeError
    assert TABLE[ENTRY] is given
