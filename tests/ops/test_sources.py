"""The faster function that records where an operator was registered: it agrees with torch's, which is restored."""

from __future__ import annotations

import pytest
import torch
from torch._library import utils

from fxshard._torch_compat.imports.sources import quick_sources, source


def test_sources_agree_with_torch() -> None:
    def caller(of: object, level: int) -> str:
        return of(level)  # type: ignore[operator, no-any-return]

    for level in (1, 2):
        assert caller(utils.get_source, level) == caller(source, level)
    assert caller(source, 1) != caller(source, 2)


def test_the_replaced_function_is_restored() -> None:
    before = utils.get_source
    with pytest.raises(ValueError), quick_sources():
        assert torch._library.utils.get_source is source
        raise ValueError
    assert utils.get_source is before
