"""Tensor literals and plain tensor attributes of a model become calls in the graph, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace.rewrites.constants import MAX_CONSTANT_ELEMENTS
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import SQUARE, Function, check_eager, real, targets

X = real(6, 4)


def has_no_constants(graph: PlanningGraph) -> bool:
    """Whether the graph has no tensors of its own, and no inputs besides the user's, parameters and tangents."""
    kinds = {i.kind for i in graph.inputs}
    return not [n for n in graph.nodes if n.op == "get_attr"] and kinds <= {"input", "tangent", "parameter"}


WRITTEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "floats": lambda self, x: x * torch.tensor([1.5, 2.0, -3.0, 4.0], dtype=torch.float64),
    "number": lambda self, x: x * torch.tensor(2.5),
    "integers": lambda self, x: x[torch.tensor([2, 0, 1])] + torch.tensor(2**53 + 1),
    "bools": lambda self, x: x.masked_fill(torch.tensor([True, False, False, True]), -1.0),
    "infinities": lambda self, x: x.clamp(max=torch.tensor([0.0, float("inf"), 1.0, -float("inf")])).sigmoid(),
    "rows": lambda self, x: x @ torch.tensor([[1.0, 0], [0, 1], [2, 2], [-1, 1]], dtype=torch.float64),
    "half precision": lambda self, x: x * torch.tensor([1.5, 0.25, 2, 3], dtype=torch.bfloat16),
    "all equal": lambda self, x: x + torch.tensor([3.0] * 4),
    "no elements": lambda self, x: torch.cat([x, torch.tensor([], dtype=torch.float64).view(0, 4)]),
    "twice": lambda self, x: (x * torch.tensor([1.0, 2, 3, 4]), x.sum() * torch.tensor([5.0, 6])),
    "changed": lambda self, x: x * torch.tensor([1.0, 2, 3, 4]).add_(1),
    "returned": lambda self, x: (x * 2, torch.tensor([1, 2, 3])),
}


@pytest.mark.parametrize("forward", WRITTEN.values(), ids=WRITTEN)
def test_tensor_literals_in_the_forward(forward: Callable[..., Any]) -> None:
    graph, _ = check_eager(Function(forward), X)
    assert has_no_constants(graph)


def test_equal_elements_are_a_fill_which_can_be_sharded() -> None:
    graph, _ = check_eager(Function(lambda self, x: x + torch.tensor([[3.0] * 4] * 6)), X)
    assert "aten.full.default" in targets(graph) and "fxshard.constant.default" not in targets(graph)


def test_attributes_that_are_no_buffers() -> None:
    weights = {"table": torch.arange(4.0).double(), "parts": [1, torch.tensor([1.0, 2, 3, 4])], "named": {"x": torch.tensor(3.0)}}
    model = Function(lambda self, x: x * self.table + self.parts[1] - self.named["x"], **weights)
    graph, _ = check_eager(nn.Sequential(model, nn.Linear(4, 4, dtype=torch.float64)), X)
    assert has_no_constants(graph)


def test_an_attribute_that_is_a_parameter_stays_one() -> None:
    layer = nn.Linear(4, 4, dtype=torch.float64)
    graph, result = check_eager(Function(lambda self, x: self.layer(x) + self.again[0], layer=layer, again=[layer.bias]), X)
    assert {i.name for i in graph.inputs_of("parameter")} == {"layer.weight", "layer.bias"}
    assert result.grads.keys() >= {"layer.weight", "layer.bias"}


def _changing(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.table.add_(1)
    return x * self.table


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "too many": (
        lambda self, x: x * self.table,
        {"table": torch.arange(6.0 * (MAX_CONSTANT_ELEMENTS + 1)).view(-1, 6, 1)},
        f"attribute table has {6 * (MAX_CONSTANT_ELEMENTS + 1)} elements",
    ),
    "without values": (lambda self, x: x * self.table, {"table": torch.empty(4, device="meta")}, "attribute table has no values"),
    "changed": (_changing, {"table": torch.arange(4.0)}, "attribute table is changed in the forward"),
    "complex": (lambda self, x: x * self.table, {"table": torch.tensor([1j, 2])[:, None, None]}, "attribute table is of a kind"),
}


@pytest.mark.parametrize(("forward", "attributes", "message"), REFUSED.values(), ids=REFUSED)
def test_attributes_that_must_be_buffers(forward: Callable[..., Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        trace(Function(forward, **attributes), (X,))
    assert "register_buffer" in caught.value.remedy


def test_a_trained_attribute_must_be_a_parameter() -> None:
    with pytest.raises(TraceError, match="attribute table requires a gradient") as caught:
        trace(Function(lambda self, x: x * self.table, table=torch.arange(4.0, requires_grad=True)), (X,))
    assert "nn.Parameter" in caught.value.remedy


def test_a_constant_that_is_too_large_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=f"constant tensor has {MAX_CONSTANT_ELEMENTS + 2} elements") as caught:
        trace(Function(lambda self, x: x.sum() * torch.tensor(list(range(MAX_CONSTANT_ELEMENTS + 2)))), (X,))
    assert "test_constants.py" in caught.value.where


def test_a_program_with_constants_is_stored_and_read(tmp_path: Path) -> None:
    forward = lambda self, x: (x * torch.tensor([1.0, 2, float("inf"), 4]), 7, None, torch.rand_like(x) * torch.tensor(2))  # noqa: E731
    model = Function(forward)
    program = fxshard.export(model, (X.detach(),), SQUARE)
    program.save(tmp_path / "m.pt2")
    loaded = fxshard.load(tmp_path / "m.pt2")
    torch.manual_seed(0)
    first = fxshard.simulate(program, (X.detach(),)).outputs
    torch.manual_seed(0)
    again = fxshard.simulate(loaded, (X.detach(),)).outputs
    assert first[1:3] == again[1:3] == (7, None)
    torch.testing.assert_close((first[0], first[3]), (again[0], again[3]), rtol=0, atol=0)
