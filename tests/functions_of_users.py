"""``torch.autograd.Function``s as users write them. Each backward differs from the true derivative, which shows that it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Saved(Function):
    """Saves tensors, and has arguments that are not tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float, mode: str = "both", holder: Any = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.mode, ctx.kept = scale, mode, x.sum()
        return (x @ weight) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        back = (x + ctx.kept).T @ grad if ctx.mode == "both" else None
        return 2 * ctx.scale * grad @ weight.T, back, None, None, None


class Several(Function):
    """Three outputs, of which the middle one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        largest, places = x.max(1)
        ctx.save_for_backward(places)
        ctx.columns = x.shape[1]
        ctx.mark_non_differentiable(places)
        return largest, places, x * 3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, other: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros(len(grad), ctx.columns, dtype=grad.dtype).scatter(1, places[:, None], grad[:, None]) - other


class Mask(Function):
    """One output, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Needed(Function):
    """Computes only needed gradients. Also has a jvp, which is never called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (grad * y * 5 if ctx.needs_input_grad[0] else None), (grad * x * 7 if ctx.needs_input_grad[1] else None)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Apart(Function):
    """Has a separate ``setup_context``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: int) -> Any:
        return x.sin() * factor, x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x.cos() * ctx.factor - other, None


class InPlace(Function):
    """Changes its second argument in place, saves its new value, and returns it with another tensor."""

    @staticmethod
    def forward(ctx: Any, factor: int, x: Tensor) -> Any:
        other = x * 7
        x.mul_(factor).sin_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return other, x

    @staticmethod
    def backward(ctx: Any, other: Tensor, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, 2 * other + grad * x


class InPlaceResult(Function):
    """Returns the result of an in-place operator; has a separate ``setup_context``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 4


class Counted(Function):
    """Changes a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Any:
        count.add_(1)
        ctx.mark_dirty(count)
        ctx.mark_non_differentiable(count)
        return x * count, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad * 4, None


class Again(Function):
    """Recomputes in its backward, and differentiates that with autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.sin() @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            y = (leaves[0].sin() @ leaves[1]).tanh() * 2
        return torch.autograd.grad(y, leaves, grad)


def seen_afterwards(self: nn.Module, x: Tensor) -> Tensor:
    """Reads tensors that functions changed in place through their old names and views."""
    h, view = x + 1, x * 2
    other, _ = InPlace.apply(3, h)
    InPlaceResult.apply(view[1:])
    return other * h + view


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "saved": lambda self, x: Saved.apply(x, self.weight, 0.5, "both", object),
    "twice": lambda self, x: Saved.apply(Saved.apply(x, self.weight, 2.0), self.weight.T, 0.5, "one"),
    "several": lambda self, x: tuple(y * 2 for y in Several.apply(x)),
    "mask": lambda self, x: x * Mask.apply(x),
    "needed": lambda self, x: Needed.apply(x, self.scale.detach()) + Needed.apply(x.detach(), self.scale),
    "apart": lambda self, x: sum(Apart.apply(x, 3)),
    "in_place": seen_afterwards,
    "counted": lambda self, x: Counted.apply(x, self.count)[0],
    "again": lambda self, x: Again.apply(x, self.weight),
}


class Net(nn.Module):
    """A linear layer [rows, 6] -> [rows, 4], then the function of ``case``."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.lin, self.weight, self.scale = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
        self.count, self.case = nn.Buffer(torch.zeros(4)), case

    def forward(self, x: Tensor) -> Any:
        return CASES[self.case](self, self.lin(x))
