"""Measuring a program on wrong values is an error with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from fxshard.errors import FxshardError, OptionError, RunError
from fxshard.testing import measure_allocated, measure_memory, program_values

X = torch.ones(4, 4)


@pytest.fixture(scope="module")
def program() -> fxshard.ShardedProgram:
    model = torch.nn.Linear(4, 4)
    return fxshard.lower(model, (X,), fxshard.plan(model, (X,), fxshard.Mesh({"dp": 2}), cache=False))


BAD: list[tuple[Any, str]] = [
    ([X], "1 values for the 4 inputs of the program"),
    (None, "None for the 4 inputs"),
    ([X, torch.ones(4), torch.ones(2, 2), X], r"args\[0\] is \(2, 2\) torch.float32, the program takes \(4, 4\)"),
    ([X, torch.ones(4), X.double(), X], "torch.float64, the program takes"),
    ([X, "bias", X, X], "parameter 'bias' is a str, not a tensor"),
    ([X.to("meta"), torch.ones(4), X, X], "parameter weight has no memory: it is on meta"),
]


@pytest.mark.parametrize(("values", "what"), BAD, ids=[what for _, what in BAD])
@pytest.mark.parametrize("measure", [measure_memory, measure_allocated])
def test_wrong_values(program: fxshard.ShardedProgram, measure: Any, values: Any, what: str) -> None:
    with pytest.raises(RunError, match=what) as caught:
        measure(program, values)
    assert caught.value.remedy


def test_wrong_program_and_rank(program: fxshard.ShardedProgram) -> None:
    values = [X, torch.ones(4), X, X]
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (program.plan, {}, "not a ShardingPlan"),
        (program, {"coordinate": (5,)}, r"mesh dp=2 has no rank at \(5,\)"),
        (program, {"coordinate": (0, 0)}, "no rank at"),
    ]
    for subject, options, what in wrong:
        with pytest.raises(OptionError, match=what):
            measure_memory(subject, values, **options)
    with pytest.raises(FxshardError, match="unknown compiler 'nvcc'"):
        measure_allocated(program, values, compiler="nvcc")


def test_program_values_can_be_measured(program: fxshard.ShardedProgram) -> None:
    model = torch.nn.Linear(4, 4)
    assert measure_memory(program, program_values(program, model, (X,))).peak > 4 * 16
