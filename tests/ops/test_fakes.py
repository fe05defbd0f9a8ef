"""Fake implementations for operators that torch has none for: they match torch's results, and models with them train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard._torch_compat.fakes import FakeTensorMode
from tests.passes.tracing import Function, check_eager, real

aten = torch.ops.aten
PROBS, TARGETS = real(9, 2, 4, grad=False).log_softmax(-1), torch.tensor([[1, 2], [3, 3]])
LENGTHS = ([9, 8], [2, 1])
LOSSES, ALPHA = aten._ctc_loss.default(PROBS, TARGETS, *LENGTHS)
TRANSPOSED = PROBS.transpose(0, 1).contiguous().transpose(0, 1)
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "loss": (aten._ctc_loss.default, (PROBS, TARGETS, *LENGTHS)),
    "gradient": (aten._ctc_loss_backward.default, (LOSSES, PROBS, TARGETS, *LENGTHS, LOSSES, ALPHA, 0)),
    "gradient of a transpose": (aten._ctc_loss_backward.default, (LOSSES, TRANSPOSED, TARGETS, *LENGTHS, LOSSES, ALPHA, 0)),
    "gradient, lengths in tensors": (
        aten._ctc_loss_backward.Tensor,
        (LOSSES, PROBS, TARGETS, *map(torch.tensor, LENGTHS), LOSSES, ALPHA, 0),
    ),
    **{
        f"least squares, {driver}, {a} {b}": (aten.linalg_lstsq.default, (real(*a, grad=False), real(*b, grad=False), None, driver))
        for driver, a, b in [
            *((None, a, b) for a, b in [((3, 5, 4), (3, 5, 2)), ((3, 5, 4), (3, 5)), ((5, 4), (5,)), ((2, 4, 6), (2, 4, 2))]),
            *(("gels", a, b) for a, b in [((3, 5, 4), (3, 5, 2)), ((3, 5, 4), (3, 5)), ((5, 4), (5,)), ((4, 4), (4, 1))]),
            ("gelsd", (2, 4, 6), (2, 4, 3)),
        ]
    },
}


@pytest.mark.parametrize("name", CASES)
def test_fakes_match_torch(name: str) -> None:
    op, args = CASES[name]
    mode = FakeTensorMode()
    fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
    with mode:
        got = _called(op, fakes)
    for mine, real_one in zip(*map(torch.utils._pytree.tree_leaves, (got, _called(op, args))), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (real_one.shape, real_one.dtype, real_one.stride())


def _called(op: Any, args: tuple[Any, ...]) -> Any:
    return op(*args[:3], driver=args[3]) if op is aten.linalg_lstsq.default else op(*args)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tensors", [True, False])
def test_ctc_loss_trains(tensors: bool, reduction: str) -> None:
    lengths = [torch.tensor(x) for x in LENGTHS] if tensors else list(LENGTHS)
    model = Function(lambda _, x, at: F.ctc_loss(x.log_softmax(-1), at, *lengths, reduction=reduction))
    check_eager(model, real(9, 2, 4), TARGETS, plans=2)


def test_ctc_loss_of_one_sequence_without_a_batch() -> None:
    model = Function(lambda _, x, at, n, m: F.ctc_loss(x.log_softmax(-1), at, n, m, reduction="none"))
    check_eager(model, real(9, 4), TARGETS[0], torch.tensor(9), torch.tensor(2), plans=2)
