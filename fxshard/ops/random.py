"""Random operators: a draw's key is derived from a seed and the draw's number, an element's number from the key and its global index.

``random`` draws numbers, ``dropout`` masks and scales. Their ``_shard`` forms compute only a rank's shard of the same draw (except
permutations, which are drawn whole). ``keep_mask`` is dropout's mask alone, into which ``dropout`` is expanded for compilers.
``rng_seed`` marks the seed during a trace; it becomes an input of the graph.

Local forms take the sharded dims (``cut``) and the shard's offset on each (scalar tensors). Their last argument is one of
``GENERATORS``: with ``"torch"`` they use torch's own operators, with a generator seeded by seed, draw number and the shard's offset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxshard.ops import counter
from fxshard.ops.kernels import operator

KINDS = ("uniform", "normal", "integers", "permutation")
"""In this order: in [0, 1); with mean 0 and standard deviation 1; from low to high - 1; each of 0 to n - 1 once."""
GENERATORS = ("fxshard", "torch")
BLOCK = 1 << 16
"""Elements drawn at a time on a CPU, so that intermediate results stay in its caches."""


@torch.library.custom_op("fxshard::rng_seed", mutates_args=())
def rng_seed() -> torch.Tensor:
    """An int64 seed from the default CPU generator; in a planning graph an input, the same on all ranks."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


rng_seed.register_fake(lambda: torch.empty((), dtype=torch.int64))


def draw_elements(kind: str, low: Any, high: int, dtype: torch.dtype, keys: counter.Words, index: counter.Words) -> torch.Tensor:
    """The numbers of one draw at these indices; kind "kept" is a mask that is False with probability ``low``."""
    if kind == "kept":
        return counter.keep_mask(keys, index, low)
    if kind == "uniform":
        return counter.uniform(keys, index, dtype)
    if kind == "normal":
        return counter.normal(keys, index, dtype)
    if kind == "integers":
        return counter.integers(keys, index, low, high).to(dtype)
    raise RuntimeError(f"random: kind {kind!r} is none of {', '.join(KINDS)}")


def is_fusible(kind: str, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a draw consists of few enough operators for a compiler to fuse them into its users.

    Draws by Threefry do not: Inductor duplicates an operator for each user, and takes most of a minute for one draw.
    """
    few = kind == "kept" or (kind == "uniform" and dtype != torch.float64)
    return few and math.prod(shape) <= 1 << 32


def permutation(shape: Sequence[int], dtype: torch.dtype, keys: counter.Words, device: Any) -> torch.Tensor:
    """A permutation of 0 to n - 1: the stable order of 63 random bits per element."""
    bits = counter.join_words(*counter.threefry_pair(keys, counter.index_of(shape, shape, [0], device)))
    return torch.sort(bits, stable=True).indices.to(dtype)


def draw_shard(
    kind: str,
    low: Any,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    keys: counter.Words,
    sizes: Sequence[int],
    offsets: Sequence[Any],
    device: Any,
) -> torch.Tensor:
    """The block of ``sizes`` at ``offsets`` (per dim, integers or scalar tensors) of one draw of ``shape``, by torch operators."""
    if kind != "permutation":
        return draw_elements(kind, low, high, dtype, keys, counter.index_of(shape, sizes, offsets, device))
    whole = permutation(shape, dtype, keys, device)
    return whole if tuple(sizes) == tuple(shape) else whole.index_select(0, torch.arange(sizes[0], device=device) + offsets[0])


def offsets_of(ndim: int, cut: Sequence[int], starts: Sequence[Any]) -> list[Any]:
    """Offsets per dim; 0 for dims that are not in ``cut``."""
    places = dict(zip(cut, starts, strict=True))
    return [places.get(d, 0) for d in range(ndim)]


def blocks(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, sizes) of contiguous blocks of at most ``BLOCK`` elements."""
    inner = next((d for d in range(len(sizes)) if math.prod(sizes[d + 1 :]) <= BLOCK), None)
    if inner is None:
        yield (), ()
        return
    rows = max(1, BLOCK // max(1, math.prod(sizes[inner + 1 :])))
    for lead in itertools.product(*map(range, sizes[:inner])):
        for start in range(0, sizes[inner], rows):
            yield (*lead, start, *[0] * (len(sizes) - inner - 1)), (*[1] * inner, min(rows, sizes[inner] - start), *sizes[inner + 1 :])


def draw(
    kind: str,
    low: Any,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int] | None = None,
    cut: Sequence[int] = (),
    starts: Sequence[Any] = (),
    device: torch.device | None = None,
    rng: str = GENERATORS[0],
) -> torch.Tensor:
    """Computes a shard of one draw eagerly; the whole draw by default."""
    sizes, device = shape if sizes is None else sizes, device or seed.device
    if rng == "torch":
        return _drawn_by_torch(kind, low, high, shape, dtype, seed, call, sizes, cut, starts, device)
    keys = counter.keys_of(int(seed), call).to(device)[:, 0].unbind()
    if device.type != "cpu" or kind == "permutation" or math.prod(sizes) <= BLOCK:
        return draw_shard(kind, low, high, shape, dtype, keys, sizes, offsets_of(len(shape), cut, starts), device).contiguous()
    offsets = [int(o) for o in offsets_of(len(shape), cut, starts)]
    out = torch.empty(tuple(sizes), dtype=dtype, device=device)
    for start, part in blocks(sizes):
        at = [o + s for o, s in zip(offsets, start, strict=True)]
        piece = draw_shard(kind, low, high, shape, dtype, keys, part, at, device)
        out[tuple(slice(s, s + n) for s, n in zip(start, part, strict=True))] = piece
    return out


def _drawn_by_torch(
    kind: str,
    low: Any,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    cut: Sequence[int],
    starts: Sequence[Any],
    device: torch.device,
) -> torch.Tensor:
    """A shard drawn by torch, seeded by the draw and the shard's offset, so that replicas agree and other shards are independent."""
    keyed = counter.join_words(*counter.keys_of(int(seed), call))
    if kind != "permutation":
        place = sum(int(o) * math.prod(shape[d + 1 :]) for d, o in enumerate(offsets_of(len(shape), cut, starts)))
        keyed = counter.join_words(*counter.keys_of(int(keyed), place))
    generator = torch.Generator(device).manual_seed(int(keyed))
    if kind == "permutation":
        whole = torch.randperm(shape[0], generator=generator, dtype=dtype, device=device)
        return whole[int(starts[0]) :][: sizes[0]].clone() if cut else whole
    options: Any = {"generator": generator, "dtype": dtype, "device": device}
    if kind == "kept":
        return torch.empty(tuple(sizes), dtype=torch.bool, device=device).bernoulli_(1 - low, generator=generator)
    if kind == "integers":
        return torch.randint(low, high, tuple(sizes), **options)
    return torch.rand(tuple(sizes), **options) if kind == "uniform" else torch.randn(tuple(sizes), **options)


@torch.library.custom_op("fxshard::random", mutates_args=())
def random(
    kind: str,
    low: int,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Numbers of one of ``KINDS``, the same for the same arguments on every device; ``low`` and ``high`` bound integers, ``call`` is the
    number of the draw."""
    return draw(kind, low, high, shape, dtype, seed, call, device=device)


random.register_fake(lambda kind, low, high, shape, dtype, seed, call, device=None: _empty_by(seed, shape, dtype, device))


@torch.library.custom_op("fxshard::random_shard", mutates_args=())
def random_shard(
    kind: str,
    low: int,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    cut: Sequence[int],
    offsets: Sequence[torch.Tensor],
    device: torch.device | None = None,
    rng: str = GENERATORS[0],
) -> torch.Tensor:
    """The shard of ``random`` of ``shape`` that has ``sizes`` and starts at ``offsets`` on the dims ``cut``."""
    return draw(kind, low, high, shape, dtype, seed, call, sizes, cut, offsets, device, rng)


@random_shard.register_fake
def _(kind: str, low: int, high: int, shape: Any, dtype: Any, seed: Any, call: int, sizes: Any, cut: Any, offsets: Any, *more: Any) -> Any:
    return _empty_by(seed, sizes, dtype, *more[:1])


def _empty_by(seed: Any, shape: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """An empty tensor on ``device``, by default the seed's; on meta if the seed is, for shape inference."""
    return torch.empty(shape, dtype=dtype, device=seed.device if device is None or seed.device.type == "meta" else device)


@torch.library.custom_op("fxshard::draw_keys", mutates_args=())
def draw_keys(seed: torch.Tensor, first: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """int32 [2, count]: the keys of ``count`` draws, by ``counter.keys_of``."""
    return counter.keys_of(int(seed), first, count).to(device or seed.device)


draw_keys.register_fake(lambda seed, first, count, device=None: _empty_by(seed, (2, count), torch.int32, device))


@torch.library.custom_op("fxshard::keep_mask", mutates_args=())
def keep_mask(
    p: float,
    seed: torch.Tensor,
    call: int,
    shape: Sequence[int],
    sizes: Sequence[int],
    cut: Sequence[int],
    offsets: Sequence[torch.Tensor],
    device: torch.device | None = None,
    rng: str = GENERATORS[0],
) -> torch.Tensor:
    """True with probability 1 - p: the mask of ``dropout_shard``."""
    return draw("kept", p, 0, shape, torch.bool, seed, call, sizes, cut, offsets, device, rng)


@keep_mask.register_fake
def _(p: float, seed: Any, call: int, shape: Any, sizes: Any, cut: Any, offsets: Any, *more: Any) -> torch.Tensor:
    return _empty_by(seed, sizes, torch.bool, *more[:1])


def mask_and_scale(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` where ``mask`` is True, else 0, scaled by 1 / (1 - p) to keep its mean."""
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


@torch.library.custom_op("fxshard::dropout", mutates_args=())
def dropout(x: torch.Tensor, p: float, seed: torch.Tensor, call: int, inside: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """(x with elements zeroed with probability p and the rest scaled by 1 / (1 - p), the keep-mask).

    ``inside``: the operator that was decomposed to expose this dropout, if any.
    """
    mask = draw("kept", p, 0, x.shape, torch.bool, seed, call, device=x.device)
    return mask_and_scale(x, mask, p).contiguous(), mask


def _masked(x: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


dropout.register_fake(_masked)


@operator(lambda grad, *_: grad.new_empty(grad.shape))
def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient where the mask is True, scaled like the forward."""
    return mask_and_scale(grad, mask, p)


@operator(_masked)
def dropout_shard(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    call: int,
    shape: Sequence[int],
    cut: Sequence[int],
    offsets: Sequence[torch.Tensor],
    rng: str = GENERATORS[0],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dropout`` of a shard: ``shape`` is the global shape, ``offsets`` the shard's offsets on the dims ``cut``.

    The mask is one operator; the rest is arithmetic that a compiler fuses.
    """
    mask = torch.ops.fxshard.keep_mask(p, seed, call, shape, x.shape, cut, offsets, x.device, rng)
    return mask_and_scale(x, mask, p).contiguous(), mask


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return torch.ops.fxshard.dropout_backward(grad, mask, ctx.p), None, None, None, None


dropout.register_autograd(_backward, setup_context=_setup)


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.p = inputs[2]
    ctx.save_for_backward(inputs[1])


def _backward_twice(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return torch.ops.fxshard.dropout_backward(grad, mask, ctx.p), None, None


torch.library.register_autograd("fxshard::dropout_backward", _backward_twice, setup_context=_setup_twice)
