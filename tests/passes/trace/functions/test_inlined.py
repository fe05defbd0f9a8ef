"""Functions that Dynamo cannot capture as they are called: their replacements compute the same, under any plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard.errors import TraceError
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import TWO as MESH
from tests.passes.tracing import Function, check_eager, real, simulated, targets
from tests.torch_versions import SINCE_2_15


def shrinks(_: Any, x: torch.Tensor) -> Any:
    """The view keeps the whole memory. A write to the smaller tensor changes the view too."""
    y = x * 2
    view = y.view(-1)
    z = y.resize_(4, 3)
    y += 1
    return y, z * y.shape[0], view


RESIZES: dict[str, Callable[..., Any]] = {
    "smaller": shrinks,
    "of a transpose": lambda _, x: x.transpose(0, 1).clone().resize_((2, 3)),
    "as another": lambda _, x: (x * 2).resize_as_(x[:2, :2]),
    "by torch's function": lambda _, x: torch.resize_as_(x * 2, x[0, 0]) + 1,
    "of the same size": lambda _, x: x.clone().resize_(x.numel()),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resizes(name: str) -> None:
    check_eager(Function(RESIZES[name]), real(3, 5, 2, grad=False), train=False, plans=3)


def test_a_larger_size_keeps_the_old_elements() -> None:
    """From torch 2.15 on AOTAutograd takes each tensor for a view here, and refuses."""
    model, x = Function(lambda _, x: x.clone().resize_(40)), real(3, 5, grad=False)
    if SINCE_2_15:
        with pytest.raises(TraceError, match="resize a view tensor to a larger size"):
            trace(model, (x,), train=False)
        return
    graph = trace(model, (x,), train=False)
    assert "aten.resize.default" in targets(graph)
    result = simulated(graph, MESH, model, (x,)).outputs
    torch.testing.assert_close(result[:15], x.reshape(-1))
    assert result.shape == (40,)


@pytest.mark.parametrize("resize", [lambda x: x.resize_(2), lambda x: torch.Tensor.resize_(x, 2), lambda x: torch.resize_as_(x, x[:1])])
def test_an_input_is_not_resized(resize: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"resize_|input args\[0\] gets another shape"):
        trace(Function(lambda _, x: resize(x) + 1), (real(3, grad=False),), train=False)


def test_a_resize_to_another_memory_format_is_refused() -> None:
    model = Function(lambda _, x: x.clone().resize_([1, 2, 2, 1], memory_format=torch.channels_last))
    with pytest.raises(TraceError, match=r"resized to torch\.channels_last"):
        trace(model, (real(4, grad=False),), train=False)


SPLITS: list[Callable[..., Any]] = [
    lambda _, x: x.tensor_split(3, dim=1),
    lambda _, x: torch.tensor_split(x, indices=(1, 2)),
    lambda _, x: torch.tensor_split(x, sections=2),
    lambda _, x: torch.tensor_split(x, tensor_indices_or_sections=torch.tensor([1, 4])),
]


@pytest.mark.parametrize("split", SPLITS)
def test_splits_at_constant_places(split: Callable[..., Any]) -> None:
    model, x = Function(split), real(5, 4, grad=False)
    result = simulated(trace(model, (x,), train=False), MESH, model, (x,)).outputs
    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize("places", [[1, 3], [3, 1], [-2, 9], [0, 0]])
@pytest.mark.parametrize("dim", [0, -1])
def test_splits_at_places_from_a_tensor(places: list[int], dim: int) -> None:
    """The graph does not depend on the example's places: others give right results too."""
    model = Function(lambda _, x, at: [(part * (i + 2)).exp().sum(dim) for i, part in enumerate(x.tensor_split(at, dim))])
    x, other = real(5, 4), torch.tensor([2, 4])
    graph, _ = check_eager(model, x, torch.tensor(places), plans=2)
    result = simulated(graph, MESH, model, (x, other), plan=1)
    torch.testing.assert_close(result.outputs, model(x, other), rtol=1e-12, atol=0)


def test_the_number_of_parts_must_be_known() -> None:
    with pytest.raises(TraceError, match="takes the number of parts from a tensor"):
        trace(Function(lambda _, x, n: torch.tensor_split(x, n)), (real(5), torch.tensor(2)), train=False)


@pytest.mark.parametrize("recipe", [F.ScalingType.TensorWise, F.ScalingType.RowWise])
def test_members_of_enumerations_are_numbers(recipe: Any) -> None:
    """They are arguments of the model or constants in its code. The tolerance is that of bfloat16, which has eight bits."""
    rows = recipe == F.ScalingType.RowWise
    a, b = real(5, 32, grad=False).to(torch.float8_e4m3fn), real(48, 32, grad=False).to(torch.float8_e4m3fn)
    scales = (torch.rand(5, 1), torch.rand(1, 48)) if rows else (torch.rand(1), torch.rand(1))
    plain = F.SwizzleType.NO_SWIZZLE

    def forward(_: Any, a: Any, b: Any, s: Any, t: Any, kind: Any) -> Any:
        given = torch._scaled_mm_v2(a, b.t(), [s], [kind], [plain], [t], [kind], [plain], None, torch.bfloat16)
        return given, F.scaled_mm(a, b.t(), s, recipe, t, recipe, plain, plain, output_dtype=torch.float32)

    graph, _ = check_eager(Function(forward), a, b, *scales, recipe, train=False, rtol=2**-7, plans=3)
    assert "aten._scaled_mm_v2.default" in targets(graph)
