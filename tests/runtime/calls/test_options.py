"""Options that do not exist are refused with what was meant."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (fxshard.plan, {"memory_limt": 1}, r"plan has no option 'memory_limt'; did you mean 'memory_limit'\?"),
        (fxshard.plan, {"kwargs": {}}, r"plan has no option 'kwargs'(.|\n)*example_kwargs="),
        (fxshard.export, {"paralel": "fsdp"}, r"export has no option 'paralel'; did you mean 'parallel'\?"),
        (fxshard.lower, {"wihout": ()}, r"lower has no option 'wihout'; did you mean 'without'\?"),
        (fxshard.plan_pipeline, {"microbatch": 4}, r"plan_pipeline has no option 'microbatch'; did you mean 'microbatches'\?"),
    ],
)
def test_functions_name_the_option_that_was_meant(function: Any, options: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        function(torch.nn.Linear(2, 2), (torch.ones(2),), **options)


def test_arguments_by_name() -> None:
    with pytest.raises(fxshard.FxshardError, match=r"the arguments are a dict(.|\n)*example_kwargs="):
        check_call(torch.nn.Linear(2, 2), {"input": torch.ones(2)})
