"""fxshard's own operators: torch's opcheck, gradients by finite differences, and strides of fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import fxshard.ops  # noqa: F401
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.ops.contraction import einsum_kernel
from fxshard.ops.random import KINDS
from tests.passes.tracing import real

OPS = torch.ops.fxshard
SEED = torch.tensor(77)
ONE = torch.tensor(1)
Q, K = real(2, 4, 5, 6), real(2, 4, 7, 6)
MASK = real(5, 7, grad=False) > 0
MASK[:, 0] = True
CHANNELS = real(3, grad=False).abs()


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The same values with transposed strides."""
    return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad)


ROWS = swapped(real(2, 5, 3, grad=False))
MOST = ROWS.amax(1)
SUMS = (ROWS - MOST.unsqueeze(1)).exp().sum(1)
PLACES = torch.tensor([[0, 4, 2], [1, 1, -100]])

SAMPLES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "matmul": (OPS.einsum, (real(4, 5), real(5, 3), "ij,jk->ik")),
    "batched, transposed": (OPS.einsum, (real(2, 4, 5), real(2, 3, 5), "bij,bkj->bki")),
    "strided": (OPS.einsum, (swapped(real(4, 5)), swapped(real(5, 3)), "ij,jk->ik")),
    "outer": (OPS.einsum, (real(4), real(3), "i,j->ji")),
    "to a number": (OPS.einsum, (real(4, 5), real(4, 5), "ij,ij->")),
    "attention": (OPS.sdpa, (Q, K, K, None, False, None, False)),
    "attention, masked": (OPS.sdpa, (Q, K, K, MASK, False, 0.3, False)),
    "attention, causal": (OPS.sdpa, (Q, K, K, None, True, None, False)),
    "attention, grouped": (OPS.sdpa, (Q, real(2, 2, 7, 6), real(2, 2, 7, 6), None, False, None, True)),
    "attention, strided": (OPS.sdpa, (swapped(Q), swapped(K), swapped(K), None, False, None, False)),
    "dropout": (OPS.dropout, (real(5, 3), 0.4, SEED, 1)),
    "dropout, strided": (OPS.dropout, (swapped(real(5, 3)), 0.4, SEED, 1)),
    "dropout of a shard": (OPS.dropout_shard, (real(2, 3, grad=False), 0.4, SEED, 1, [5, 3], [0], [ONE])),
    "mask of a shard": (OPS.keep_mask, (0.4, SEED, 1, [5, 3], [2, 3], [0], [ONE])),
    "dropout, backward": (OPS.dropout_backward, (swapped(real(5, 3)), real(5, 3, grad=False) > 0, 0.4)),
    "uniform": (OPS.random, ("uniform", 0, 0, [5, 3], torch.float32, SEED, 0)),
    "normal": (OPS.random, ("normal", 0, 0, [5, 3], torch.float64, SEED, 0)),
    "integers": (OPS.random, ("integers", -3, 9, [5, 3], torch.int64, SEED, 0)),
    "permutation": (OPS.random, ("permutation", 0, 0, [5], torch.int64, SEED, 0)),
    "shard of a draw": (
        OPS.random_shard,
        ("uniform", 0, 0, [5, 3], torch.float32, SEED, 0, [2, 2], [0, 1], [ONE, ONE], torch.device("cpu")),
    ),
    "softmax": (OPS.softmax, (ROWS, MOST, SUMS, 1, "exp", torch.float32)),
    "softmax, safe": (OPS.softmax, (ROWS, MOST, SUMS, 1, "safe", torch.float64)),
    "softmax, log": (OPS.softmax, (ROWS, MOST, SUMS, 1, "log", torch.float64)),
    "softmax, backward": (OPS.softmax_backward, (ROWS, ROWS, SUMS, 1, "exp", torch.float64)),
    "sum of exponentials": (OPS.sum_exp, (ROWS, MOST, 1)),
    "sum of exponentials, half": (OPS.sum_exp, (ROWS.bfloat16(), MOST.bfloat16(), 1)),
    "sum of products": (OPS.sum_product, (ROWS, ROWS.float(), 1)),
    "score": (OPS.target_score, (ROWS, MOST, PLACES, 1, -100, 5)),
    "score in a shard": (OPS.target_score, (ROWS.bfloat16(), None, PLACES + 3, 1, -97, 9, torch.tensor(3))),
    "sum of scores": (OPS.score_sum, (ROWS, MOST, ROWS[0, :, 0].contiguous(), 1)),
    "cross-entropy": (OPS.cross_entropy, (MOST, PLACES, ROWS[0, :, 0].contiguous(), SUMS, MOST, -100, 0.1, 5)),
    "cross-entropy of logarithms": (OPS.cross_entropy, (MOST, PLACES, None, None, None, -100, 0.0, 5)),
    "cross-entropy, backward": (OPS.cross_entropy_backward, (MOST, SUMS, None, ROWS, MOST, SUMS, PLACES, None, 1, -100, 0.0, 5)),
    "values at targets": (OPS.spread_target, (MOST, PLACES, 1, 5, torch.float32)),
    "sum by channel": (OPS.channel_sum, (real(5, 3, 4, grad=False).to(torch.bfloat16),)),
    "spread by channel": (OPS.channel_spread, (real(5, 3, 4, grad=False).half(), torch.ones(3), 20)),
    "statistics of a batch": (OPS.batch_statistics, (real(3, grad=False), CHANNELS, 20, 1e-5)),
    "running statistics": (OPS.running_statistics, (CHANNELS.half(), CHANNELS.half(), CHANNELS.float(), CHANNELS.float(), 20, 0.1)),
    "normalised": (OPS.normalise, (swapped(real(5, 3, 4, grad=False)), CHANNELS, CHANNELS, CHANNELS, None)),
    "batch norm, sums": (OPS.batch_norm_sums, (real(5, 3, grad=False), real(5, 3, seed=1, grad=False), CHANNELS, CHANNELS)),
    "batch norm, backward": (
        OPS.batch_norm_backward,
        (real(5, 3, 4, grad=False), real(5, 3, 4, seed=1, grad=False), None, CHANNELS, CHANNELS, real(2, 3, grad=False), 20),
    ),
    "constant": (OPS.constant, ([1.5, float("inf"), -2], [3, 1], torch.float32)),
    "constant, whole": (OPS.constant, ([2**62 + 1], [], torch.int64)),
}
sampled = pytest.mark.parametrize(("op", "args"), SAMPLES.values(), ids=SAMPLES)


@sampled
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.default, args)


@sampled
def test_fakes_have_the_metadata_of_results(op: Any, args: tuple[Any, ...]) -> None:
    real_results = pytree.tree_leaves(op(*args))
    with FakeTensorMode() as mode:
        fakes = pytree.tree_leaves(op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)))
    for value, fake in zip(real_results, fakes, strict=True):
        assert (value.shape, value.stride(), value.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert value.is_contiguous()


def test_opcheck_of_attention_backward() -> None:
    for grouped, keys in ((False, K), (True, real(2, 2, 7, 6))):
        args = [t.detach() for t in (Q, keys, keys)]
        out, lse = OPS.sdpa(*args, MASK, False, None, grouped)
        torch.library.opcheck(
            OPS.sdpa_backward.default, (real(2, 4, 5, 6, seed=3, grad=False), *args, out, lse, MASK, False, None, grouped)
        )


GRADIENTS = ["matmul", "batched, transposed", "strided", "outer", "to a number"]
GRADIENTS += [
    "attention",
    "attention, masked",
    "attention, causal",
    "attention, grouped",
    "attention, strided",
    "dropout",
    "dropout, strided",
]


@pytest.mark.parametrize("name", [*GRADIENTS, "dropout, backward"])
def test_gradients_by_finite_differences(name: str) -> None:
    op, args = SAMPLES[name]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]

    def first_output(*values: torch.Tensor) -> torch.Tensor:
        given = iter(values)
        filled = [next(given) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args]
        return pytree.tree_leaves(op(*filled))[0]

    assert torch.autograd.gradcheck(first_output, leaves)
    if op in (OPS.einsum, OPS.dropout):
        assert torch.autograd.gradgradcheck(first_output, leaves)


def test_the_contraction_kernel_takes_strided_operands() -> None:
    a, b, equation = SAMPLES["strided"][1]
    result = einsum_kernel(a, b, equation)
    assert_close(result, torch.einsum(equation, a, b))
    assert result.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_keyed_by_seed_and_number(kind: str) -> None:
    def draw(seed: int, call: int) -> torch.Tensor:
        dtype = torch.float64 if kind in ("uniform", "normal") else torch.int64
        return OPS.random(kind, 0, 1000, [50], dtype, torch.tensor(seed), call)

    before = torch.get_rng_state()
    assert torch.equal(draw(5, 0), draw(5, 0))
    assert torch.equal(torch.get_rng_state(), before), "a draw must not change the generator of the rank"
    assert not torch.equal(draw(5, 0), draw(5, 1)) and not torch.equal(draw(5, 0), draw(6, 0))
    draw(2**62 - 1, 2**40)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"kind 'gamma' is none of uniform, normal"):
        OPS.random("gamma", 0, 0, [5], torch.float64, SEED, 0)


def test_the_seed_comes_from_the_default_generator() -> None:
    torch.manual_seed(3)
    first = OPS.rng_seed()
    second = OPS.rng_seed()
    torch.manual_seed(3)
    assert torch.equal(OPS.rng_seed(), first) and not torch.equal(first, second)


def test_axis_index_has_no_value_before_binding() -> None:
    with pytest.raises(RuntimeError, match="no value before the program is bound"):
        OPS.axis_index("dp")
