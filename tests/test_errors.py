"""Errors are sentences."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.errors import OptionError, a_kind


def test_articles() -> None:
    assert [a_kind(v) for v in (fxshard.Equal("w"), [], 1, None, fxshard.Pin("w", "R"))] == [
        "an Equal",
        "a list",
        "an int",
        "None",
        "a Pin",
    ]


def test_one_constraint_where_a_list_belongs() -> None:
    with pytest.raises(OptionError, match="constraints are given as an Equal, not as a list"):
        fxshard.plan(torch.nn.Linear(2, 2), (torch.ones(2, 2),), fxshard.Mesh({"dp": 2}), constraints=fxshard.Equal("weight"))  # type: ignore[arg-type]
