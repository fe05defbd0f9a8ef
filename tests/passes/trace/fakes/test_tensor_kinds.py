"""Tensor subclasses, nested and sparse tensors: planned like plain tensors, or refused by name with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import fxshard
from fxshard.errors import TraceError
from fxshard.mesh.mesh import Mesh

PAIR = Mesh({"a": 2})


class Quantised(Tensor):
    """Integers and a scale for each row that appear as one float tensor, like torchao's weights."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)
        made.whole, made.scale = whole, scale  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Quantised:
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        dense = torch.utils._pytree.tree_map_only(cls, lambda x: x.whole.to(x.scale.dtype) * x.scale, args)
        return func(*dense, **(kwargs or {}))


class Named(Tensor):
    """A subclass that overrides no computation."""


class Logged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Net(nn.Module):
    def __init__(self, weight: Tensor | None = None, trained: bool = False) -> None:
        super().__init__()
        self.lin, self.shift = nn.Linear(4, 6), nn.Buffer(torch.ones(6))
        if weight is not None:
            self.lin.weight = nn.Parameter(weight, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.shift


def quantised() -> Quantised:
    return Quantised(torch.randint(-9, 9, (6, 4), dtype=torch.int8), torch.rand(6, 1))


def ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)


@pytest.mark.filterwarnings("ignore")  # torch warns that these are prototypes
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: (Net(quantised()), torch.ones(5, 4)),
            r"lin.weight is of class Quantised, which overrides __torch_dispatch__",
        ),
        (lambda: (Net(), quantised()), r"args\[0\] is of class Quantised(.|\n)*dequantise"),
        (lambda: (Net(), torch.ones(5, 4).as_subclass(Logged)), r"args\[0\] is of class Logged, which overrides __torch_function__"),
        (lambda: (Net(), masked_tensor(torch.ones(5, 4), torch.ones(5, 4) > 0)), r"args\[0\] is of class MaskedTensor(.|\n)*get_data"),
        (lambda: (Net(), ragged(torch.jagged)), r"args\[0\] is nested \(jagged\)(.|\n)*to_padded_tensor"),
        (lambda: (Net(), ragged(torch.strided)), r"args\[0\] is nested \(strided\)"),
        (lambda: (Net(), torch.ones(5, 4).to_sparse()), r"args\[0\] of shape \(5, 4\) is sparse \(torch.sparse_coo\)"),
        (lambda: (Net(), torch.ones(5, 4).to_sparse_csr()), r"is sparse \(torch.sparse_csr\)"),
    ],
)
def test_other_kinds_are_refused_by_name(make: Any, said: str) -> None:
    model, x = make()
    with pytest.raises(TraceError, match=said) as error:
        fxshard.plan(model, (x,), PAIR)
    assert error.value.remedy


@pytest.mark.parametrize("trained", [True, False])
def test_kinds_that_are_planned(trained: bool) -> None:
    """Buffers, subclasses that override no computation, and the inner tensors of a quantised weight, dequantised in the forward."""

    class Opened(Net):
        def __init__(self) -> None:
            super().__init__(torch.randn(6, 4).as_subclass(Named), trained)
            self.whole, self.scale = nn.Buffer(quantised().whole), nn.Parameter(torch.rand(6, 1), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ (self.whole.to(self.scale.dtype) * self.scale).T

    model, x = Opened().double(), torch.randn(5, 4, dtype=torch.float64).as_subclass(Named)
    plan = fxshard.plan(model, (x,), PAIR, input_layouts="S(0)", pins={"lin.weight": "S(0)", "scale": "S(0)", "whole": "S(0)"})
    result, want = fxshard.simulate(model, (x,), plan), model(x)
    want.sum().backward()
    torch.testing.assert_close(result.outputs, want.detach().as_subclass(Tensor))
    assert set(result.grads) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, grad in result.grads.items():
        torch.testing.assert_close(grad, dict(model.named_parameters())[name].grad.as_subclass(Tensor))
