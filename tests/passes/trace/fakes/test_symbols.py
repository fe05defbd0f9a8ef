"""A graph traced with symbols equals, at any sizes, the graph traced at these sizes."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch
from passes.any_size import CASES, calls, traced
from torch import nn
from torch.export import Dim

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.trace.trace import trace
from fxshard.shapes import GraphFamily, dynamic_dims


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "llama" else []) for name in CASES])
def test_at_other_sizes_it_equals_the_graph_traced_there(name: str) -> None:
    _, graph = traced(name, 4, 8)
    assert graph.family is not None
    for batch, seq in ((4, 8), (3, 5)):
        sizes = {dim.name: {"batch": batch, "seq": seq}[dim.name] for dim in graph.family.dims}
        _, there = traced(name, batch, seq, dynamic=False)
        assert calls(graph.family.at(sizes).graph) == calls(there.module.graph)


def test_without_dynamic_dims_there_is_no_family() -> None:
    assert traced("perceptron", 4, 8, dynamic=False)[1].family is None


class Specialised(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 4 else x


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 2, 8)


@pytest.mark.parametrize("model", [Specialised(), Fixed()])
def test_a_model_that_takes_one_size_is_refused_with_its_line(model: nn.Module) -> None:
    args = (torch.randn(4, 16),)
    dims = dynamic_dims(model, args, {}, {"x": {0: "batch"}})
    with pytest.raises(TraceError, match=r"batch .* cannot change, the model fixes it to 4") as caught:
        trace(model, args, dynamic=dims)
    assert __file__.rsplit("/", 1)[-1] in (caught.value.where or "") or "test_symbols" in str(caught.value)


def test_a_branch_for_a_single_size_is_refused_too() -> None:
    def traced_at(batch: int, bound: int) -> GraphFamily | None:
        model, args = Branches(bound), (torch.randn(batch, 16),)
        return trace(model, args, dynamic=dynamic_dims(model, args, {}, {"x": {0: Dim("batch", min=1)}})).family

    with pytest.raises(TraceError, match=r"cannot change, the model fixes it to 1: it takes for granted that batch <= 1 .*test_symbols"):
        traced_at(1, bound=1)
    assert traced_at(1, bound=2) is not None and traced_at(2, bound=1) is not None


class Branches(nn.Module):
    def __init__(self, bound: int = 3) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > self.bound else x


def test_a_branch_is_a_guard() -> None:
    model, args = Branches(), (torch.randn(6, 16),)
    graph = trace(model, args, dynamic=dynamic_dims(model, args, {}, {"x": {0: "batch"}}))
    assert graph.family is not None
    (guard,) = graph.family.guards
    assert [guard.holds({"batch": size}) for size in (2, 3, 4, 9)] == [False, False, True, True]
    assert "test_symbols.py" in guard.where


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_guard_of_torchs_code_names_the_users_line(tmp_path: Path) -> None:
    """Torch's batch norm asks whether each channel has one value. Neither the guard nor a file says where torch is installed."""
    program = fxshard.export(Normed(), (torch.randn(32, 4),), fxshard.Mesh({"a": 2}), dynamic_shapes=({0: "batch"},))
    line = Normed.forward.__code__.co_firstlineno + 1
    (guard,) = program.guards
    assert guard.condition == "Ne(batch, 1)" and re.fullmatch(rf".*test_symbols\.py:{line} \(torch/[\w/]+\.py:\d+\)", guard.where)
    program.save(tmp_path / "m.pt2")
    file = zipfile.ZipFile(tmp_path / "m.pt2")
    text = "".join(file.read(name).decode() for name in file.namelist() if name.endswith(".json"))
    assert guard.where in text and not re.search(r'"[^"]*/(?:torch|fxshard)/[^"]*\.py:\d+"', text)


def test_data_dependent_sizes_beside_dynamic_dims_are_refused() -> None:
    class Nonzero(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    model, args = Nonzero(), (torch.ones(4, 2),)
    with pytest.raises(TraceError, match="a size known only at run time"):
        trace(model, args, train=False, dynamic=dynamic_dims(model, args, {}, {"x": {0: "batch"}}))


class Counted(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.numel()


def test_a_size_that_is_returned_names_its_dim_and_line() -> None:
    model, args = Counted(), (torch.randn(6, 16),)
    with pytest.raises(TraceError, match=r"returns a size that changes \(16\*batch\) as a number") as caught:
        trace(model, args, dynamic=dynamic_dims(model, args, {}, {"x": {0: "batch"}}))
    assert "return x * 2, x.numel()" in (caught.value.where or "")
    assert trace(model, args).family is None
