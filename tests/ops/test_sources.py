"""Where an operator was registered is noted as torch does it, and torch's own function is put back."""

from __future__ import annotations

import pytest
import torch
from torch._library import utils

from fxshard._torch_compat.sources import quick_sources, source


def test_the_same_lines() -> None:
    def caller(of: object, level: int) -> str:
        return of(level)  # type: ignore[operator, no-any-return]

    for level in (1, 2):
        assert caller(utils.get_source, level) == caller(source, level)
    assert caller(source, 1) != caller(source, 2)


def test_what_was_replaced_is_put_back() -> None:
    before = utils.get_source
    with pytest.raises(ValueError), quick_sources():
        assert torch._library.utils.get_source is source
        raise ValueError
    assert utils.get_source is before
