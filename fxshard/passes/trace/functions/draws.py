"""While tracing: random operators become draws keyed by (seed, number), followed by deterministic operators on the drawn values.

A replacement returns NotImplemented for arguments that it does not support (the user's own generator, ``out=``): torch's operator then
stays in the graph, and ``check_draws`` raises an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.operators import schema_of
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line

SELU_LIMIT = 1.7580993408473766
"""scale * alpha of SELU; alpha dropout sets dropped elements to its negative."""


class Numbering(Protocol):
    """Gives every draw a unique number."""

    draws: Iterator[int]


def draw(mode: Numbering, kind: str, shape: Sequence[int], dtype: torch.dtype, low: int = 0, high: int = 0) -> Tensor:
    """One ``fxshard::random``."""
    return torch.ops.fxshard.random(kind, low, high, list(shape), dtype, torch.ops.fxshard.rng_seed(), next(mode.draws))


def masked(mode: Numbering, x: Tensor, p: float, inside: str = "") -> Tensor:
    """One ``fxshard::dropout``; ``inside``: the operator of which it is a part."""
    return torch.ops.fxshard.dropout(x, float(p), torch.ops.fxshard.rng_seed(), next(mode.draws), inside)[0]


PLACEMENT_KEYWORDS = ("device", "layout", "pin_memory", "requires_grad", "memory_format")
NUMBERS = (int, torch.SymInt)
UNSUPPORTED_KEYWORDS = ("generator", "out", "names")


def keyed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drops keyword arguments that only choose device and memory layout; returns NotImplemented for a generator or ``out=``."""

    def replaced(mode: Numbering, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in UNSUPPORTED_KEYWORDS) or any(isinstance(a, torch.Generator) for a in args):
            return NotImplemented
        return function(mode, *args, **{k: v for k, v in kwargs.items() if k not in (*PLACEMENT_KEYWORDS, *UNSUPPORTED_KEYWORDS)})

    return replaced


def _floating(dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype to draw in, torch's default if None; returns None if it is not a floating-point dtype."""
    dtype = dtype or torch.get_default_dtype()
    return dtype if dtype.is_floating_point else None


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to compute from a draw: half precision has too few distinct values."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def factory(kind: str) -> Callable[..., Any]:
    """``rand`` and ``randn``; sizes may be separate arguments or one sequence."""

    @keyed
    def make(mode: Numbering, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        shape = kwargs.pop("size", size)
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], NUMBERS) else shape
        drawn = _floating(dtype)
        return NotImplemented if drawn is None or kwargs else draw(mode, kind, shape, drawn)

    return make


def like(kind: str) -> Callable[..., Any]:
    """``rand_like`` and ``randn_like``."""

    @keyed
    def make(mode: Numbering, input: Tensor, *, dtype: torch.dtype | None = None) -> Any:
        drawn = _floating(dtype or input.dtype)
        return NotImplemented if drawn is None else draw(mode, kind, input.shape, drawn)

    return make


@keyed
def randint(mode: Numbering, *args: Any, low: int = 0, high: int | None = None, size: Any = None, dtype: torch.dtype | None = None) -> Any:
    """``randint(high, size)`` and ``randint(low, high, size)``."""
    numbers = [a for a in args if isinstance(a, NUMBERS)]
    size = next((a for a in args if not isinstance(a, NUMBERS)), size)
    if len(numbers) == 2:
        low, high = numbers
    elif numbers:
        low, high = (low, numbers[0]) if high is None else (numbers[0], high)
    if size is None or high is None or not 0 < high - low < 1 << 63:  # torch reports wrong bounds, or draws 64 bits
        return NotImplemented
    return draw(mode, "integers", size, dtype or torch.int64, low, high)


@keyed
def randint_like(
    mode: Numbering, input: Tensor, *args: int, low: int = 0, high: int | None = None, dtype: torch.dtype | None = None
) -> Any:
    return randint(mode, *args, low=low, high=high, size=input.shape, dtype=dtype or input.dtype)


@keyed
def randperm(mode: Numbering, n: int, *, dtype: torch.dtype = torch.int64) -> Any:
    return draw(mode, "permutation", [n], dtype)


@keyed
def bernoulli(mode: Numbering, input: Tensor, p: float | None = None) -> Any:
    """1 with probability p, or with the probabilities in ``input``."""
    return _trials(mode, input.shape, input if p is None else p).to(input.dtype)


@keyed
def bernoulli_(mode: Numbering, self: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return self.copy_(_trials(mode, self.shape, p))


def _trials(mode: Numbering, shape: Sequence[int], p: float | Tensor) -> Tensor:
    dtype = _precise(p.dtype) if isinstance(p, Tensor) else torch.float32
    return draw(mode, "uniform", shape, dtype) < (p.detach() if isinstance(p, Tensor) else p)


@keyed
def normal(
    mode: Numbering, mean: float | Tensor = 0.0, std: float | Tensor = 1.0, size: Any = None, *, dtype: torch.dtype | None = None
) -> Any:
    """mean + std z with standard normal z; mean and std are numbers or tensors."""
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if tensors else size
    dtype = tensors[0].dtype if tensors else _floating(dtype)
    return NotImplemented if shape is None or dtype is None else mean + std * draw(mode, "normal", shape, dtype)


def filled(values: Callable[..., Tensor], kind: str = "uniform") -> Callable[..., Any]:
    """An in-place method that fills ``self`` with ``values``, a function of a draw and the method's parameters."""

    @keyed
    def fill(mode: Numbering, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (
            self.copy_(values(draw(mode, kind, self.shape, _precise(self.dtype)), *args, **kwargs))
            if self.is_floating_point()
            else NotImplemented
        )

    return fill


def _uniform(u: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    return u * (b - a) + a


def _normal(z: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return z * std + mean


def _exponential(u: Tensor, lambd: float = 1.0) -> Tensor:
    """Never zero, so that its logarithm is finite and ``multinomial`` can divide by it."""
    return torch.log1p(-u.clamp_min(torch.finfo(u.dtype).eps / 2)) / -lambd


@keyed
def multinomial(mode: Numbering, input: Tensor, num_samples: int, replacement: bool = False) -> Any:
    """For exponential e, the index of the largest p / e has distribution p; those of the k largest are k draws without replacement."""
    weights = input.detach().to(torch.float64)  # in float32 the smallest of many e have too few distinct values
    rows = (num_samples,) if replacement else (1,)
    races = weights.unsqueeze(-2) / _exponential(draw(mode, "uniform", (*weights.shape[:-1], *rows, weights.shape[-1]), weights.dtype))
    return races.argmax(-1) if replacement or num_samples == 1 else races.squeeze(-2).topk(num_samples).indices


@keyed
def rrelu(mode: Numbering, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Any:
    """A leaky ReLU with random slopes in training, with their mean otherwise."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2)
    slopes = _uniform(draw(mode, "uniform", input.shape, _precise(input.dtype)), lower, upper)
    return torch.where(input >= 0, input, input * slopes.to(input.dtype))


def sampled(plain: Callable[..., Any], space: int) -> Callable[..., Any]:
    """Fractional max pooling over ``space`` dims, whose windows start at random places for each channel."""

    def pooled(mode: Numbering, input: Tensor, *args: Any, _random_samples: Tensor | None = None, **kwargs: Any) -> Any:
        if _random_samples is None:
            batch = 1 if input.dim() == space + 1 else input.size(0)
            _random_samples = draw(mode, "uniform", [batch, input.size(-space - 1), space], input.dtype)
        return plain(input, *args, _random_samples=_random_samples, **kwargs)

    return pooled


def dropout(mode: Numbering, input: Tensor, p: float, train: bool) -> Any:
    return _dropped(input, p, train, lambda: masked(mode, input, p))


def feature_dropout(mode: Numbering, input: Tensor, p: float, train: bool) -> Any:
    """Drops whole channels: one random number for each index of the first two dims."""
    return _dropped(input, p, train, lambda: input * masked(mode, input.new_ones(_channels(input)), p))


def alpha_dropout(mode: Numbering, input: Tensor, p: float, train: bool) -> Any:
    return _dropped(input, p, train, lambda: _alpha(mode, input, input.shape, p))


def feature_alpha_dropout(mode: Numbering, input: Tensor, p: float, train: bool) -> Any:
    return _dropped(input, p, train, lambda: _alpha(mode, input, _channels(input), p))


def native_dropout(mode: Numbering, input: Tensor, p: float, train: bool | None) -> Any:
    if train is False or not 0 <= p <= 1:
        return NotImplemented
    return torch.ops.fxshard.dropout(input, float(p), torch.ops.fxshard.rng_seed(), next(mode.draws))


def _dropped(x: Tensor, p: float, train: bool, drop: Callable[[], Tensor]) -> Any:
    """``drop()`` if anything is dropped; NotImplemented for an invalid p, for which torch raises the error."""
    if not 0 <= p <= 1:
        return NotImplemented
    return drop() if train and p > 0 else x


def _alpha(mode: Numbering, x: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Dropped elements become -SELU_LIMIT; scale and shift preserve mean and variance."""
    if p == 1:
        return x * 0
    scale = 1 / math.sqrt((SELU_LIMIT**2 * p + 1) * (1 - p))
    keep = (draw(mode, "uniform", shape, torch.float32) >= p).to(x.dtype)
    return x * (keep * scale) + (keep - 1) * (SELU_LIMIT * scale) + SELU_LIMIT * scale * p


def _channels(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place variant of a function, such as ``dropout_`` from ``dropout``."""

    def replaced(mode: Numbering, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(mode, input, *args, **kwargs)
        return result if result is NotImplemented or result is input else input.copy_(result)

    return replaced


DRAWS: dict[Any, Callable[..., Any]] = {
    torch.rand: factory("uniform"),
    torch.randn: factory("normal"),
    torch.rand_like: like("uniform"),
    torch.randn_like: like("normal"),
    torch.randint: randint,
    torch.randint_like: randint_like,
    torch.randperm: randperm,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli_,
    torch.normal: normal,
    Tensor.normal_: filled(_normal, "normal"),
    Tensor.log_normal_: filled(lambda z, mean=1.0, std=2.0: (z * std + mean).exp(), "normal"),
    Tensor.uniform_: filled(_uniform),
    Tensor.exponential_: filled(_exponential),
    Tensor.geometric_: filled(lambda u, p: (torch.log1p(-u) / math.log1p(-p)).ceil().clamp_min(1) if p < 1 else torch.ones_like(u)),
    Tensor.cauchy_: filled(lambda u, median=0.0, sigma=1.0: torch.tan((u - 0.5) * math.pi) * sigma + median),
    nn.init.uniform_: filled(_uniform),
    nn.init.normal_: filled(_normal, "normal"),
    torch.multinomial: multinomial,
    Tensor.multinomial: multinomial,
    torch.rrelu: rrelu,
    torch.rrelu_: in_place(rrelu),
    torch.dropout: dropout,
    torch.dropout_: in_place(dropout),
    torch.feature_dropout: feature_dropout,
    torch.feature_dropout_: in_place(feature_dropout),
    torch.alpha_dropout: alpha_dropout,
    torch.alpha_dropout_: in_place(alpha_dropout),
    torch.feature_alpha_dropout: feature_alpha_dropout,
    torch.feature_alpha_dropout_: in_place(feature_alpha_dropout),
    torch.native_dropout: native_dropout,
} | {
    f: sampled(f, space)
    for space, names in ((2, "fractional_max_pool2d"), (3, "fractional_max_pool3d"))
    for f in (getattr(F, names), getattr(F, f"{names}_with_indices"))
}
"""Function that the user calls -> its replacement, whose first argument is the mode, which numbers the draws."""


def check_draws(joint: fx.GraphModule) -> None:
    """Raises TraceError, naming the user's line, for an operator that would draw from each rank's own generator."""
    for node in joint.graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace == "fxshard":
            continue
        schema = schema_of(target)
        takes_generator = schema is not None and any("Generator" in str(a.type) for a in schema.arguments)
        if takes_generator or torch.Tag.nondeterministic_seeded in target.tags:
            raise TraceError(
                f"{target} draws random numbers that would depend on the mesh",
                where=source_line(node) or node.name,
                remedy="use a random function that fxshard knows, without generator= (rand, randn, normal, bernoulli, randint, randperm, "
                "multinomial, dropout, uniform_, exponential_ and their like), or draw outside of the model and pass the numbers in",
            )


NUMBERED = {torch.ops.fxshard.random.default: 6, torch.ops.fxshard.dropout.default: 3}
"""Random operators -> the index of the argument that is the draw's number."""


def number_draws(joint: fx.GraphModule) -> None:
    """Numbers the draws 0, 1, 2, ... in graph order; two nodes of one draw keep one number."""
    numbers: dict[int, int] = {}
    for node in joint.graph.nodes:
        if node.target in NUMBERED:
            at = NUMBERED[node.target]
            number = numbers.setdefault(node.args[at], len(numbers))
            node.args = (*node.args[:at], number, *node.args[at + 1 :])
