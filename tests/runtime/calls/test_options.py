"""Options that do not exist are refused with what was meant."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.errors import OptionError
from fxshard.passes.trace.trace import check_call
from fxshard.runtime.calls.options import Options, read_options


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("memory_limt", r"parallelize has no option 'memory_limt'; did you mean 'memory_limit'\?(.|\n)*its options are .*pins"),
        ("kwargs", r"parallelize has no option 'kwargs'(.|\n)*example_kwargs="),
    ],
)
def test_an_unknown_option(name: str, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        read_options(Options, {name: None}, "parallelize")


def test_arguments_by_name() -> None:
    with pytest.raises(fxshard.FxshardError, match=r"the arguments are a dict(.|\n)*example_kwargs="):
        check_call(torch.nn.Linear(2, 2), {"input": torch.ones(2)})
