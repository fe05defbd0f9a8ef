"""Replacements for functions that branch on data: results and gradients equal torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.errors import TraceError
from fxshard.passes.trace.functions import data_dependent as spelled
from fxshard.passes.trace.trace import trace


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


POSITIVE = real(5, 3).detach().abs() + 0.1
WINDOW = torch.hann_window(8, dtype=torch.float64) + 0.1
SPECTRUM = torch.stft(real(2, 40).detach(), 8, 2, window=WINDOW, return_complex=True)
CTC = (real(9, 2, 4).log_softmax(-1), torch.tensor([[1, 2], [3, 3]]), torch.tensor([9, 8]), torch.tensor([2, 1]))
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.equal, (real(3), real(3)), {}),
    (torch.equal, (real(3), real(3, 1)), {}),
    (torch.allclose, (real(3), real(3) + 1e-9), {}),
    (torch.allclose, (real(3), real(3) + 1), {}),
    (torch.narrow, (real(5, 3), 0, torch.tensor(-3), 2), {}),
    (torch.combinations, (real(4),), {"r": 3}),
    (torch.combinations, (real(3),), {"with_replacement": True}),
    (torch.combinations, (real(3),), {"r": 0}),
    (torch.cov, (real(3, 5),), {}),
    (torch.cov, (real(5),), {"correction": 0}),
    (torch.cov, (torch.complex(real(3, 5), real(3, 5)),), {}),
    (torch.cov, (real(3, 5),), {"fweights": torch.tensor([1, 2, 1, 3, 1]), "aweights": POSITIVE[:, 0]}),
    (torch.cov, (real(3, 5),), {"aweights": POSITIVE[:, 1]}),
    (torch.corrcoef, (real(3, 5),), {}),
    (torch.istft, (SPECTRUM, 8, 2), {"window": WINDOW}),
    (torch.istft, (SPECTRUM, 8, 2), {"window": WINDOW, "center": False, "length": 30}),
    (F.gaussian_nll_loss, (real(5, 3), real(5, 3).detach(), POSITIVE.requires_grad_()), {"full": True}),
    (F.gaussian_nll_loss, (real(5, 3), real(5, 3).detach(), POSITIVE[:, 0] * 1e-7), {"reduction": "none"}),
    (F.one_hot, (torch.tensor([[0, 2], [1, 1]]),), {}),
    (F.one_hot, (torch.tensor([0, 2]),), {"num_classes": 5}),
    *((F.ctc_loss, CTC, {"reduction": r}) for r in ("mean", "sum", "none")),
    *((F.ctc_loss, (CTC[0][:, 0], CTC[1][0], torch.tensor(9), torch.tensor(2)), {"reduction": r}) for r in ("mean", "none")),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CASES, ids=[f"{f.__name__}-{i}" for i, (f, _, _) in enumerate(CASES)])
def test_replacements_equal_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    want, got = function(*args, **kwargs), spelled.REPLACEMENTS[function](*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if isinstance(want, Tensor) and want.requires_grad and want.numel():
        for a, b in zip(*(torch.autograd.grad(x.abs().sum(), inputs, retain_graph=True) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


X, V, CLASSES = real(3, 5).detach(), torch.ones(3, 5, dtype=torch.float64), torch.tensor([0, 2])
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.cov, (real(2, 3, 4),), {}),
    (torch.cov, (X > 0,), {}),
    *((torch.cov, (X,), {"fweights": torch.ones(n, dtype=torch.int64)}) for n in ((1, 5), 4)),
    *((torch.cov, (X,), {"aweights": w}) for w in (V[:1], V[0, :4], -V[0], 0 * V[0])),
    (torch.cov, (X,), {"fweights": torch.tensor([1, 2, -1, 1, 1])}),
    (torch.corrcoef, (real(2, 3, 4),), {}),
    (F.one_hot, (CLASSES.int(),), {}),
    *((F.one_hot, (CLASSES, n), {}) for n in (2, 0, -3)),
    (F.one_hot, (CLASSES - 1,), {}),
    (F.one_hot, (CLASSES - 1, 4), {}),
    *((F.one_hot, (CLASSES[:0], n), {}) for n in (-1, 0)),
    *((F.gaussian_nll_loss, (X, X, v), {}) for v in (V[:1, :1], V[:2], V[0], -V, -1.0)),
    (F.gaussian_nll_loss, (X, X, V), {"reduction": "average"}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), REFUSED, ids=[f"{f.__name__}-{i}" for i, (f, _, _) in enumerate(REFUSED)])
def test_refused_as_by_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks of values are nodes of the graph, which raise a RuntimeError."""
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        function(*args, **kwargs)
    with pytest.raises((RuntimeError, ValueError)) as ours:
        spelled.REPLACEMENTS[function](*args, **kwargs)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize(("name", "weights"), [("fweights", V[0]), ("aweights", torch.ones(5, dtype=torch.int64))])
def test_dtypes_of_weights(name: str, weights: Tensor) -> None:
    """Torch's message has other names for the dtypes."""
    for cov in (torch.cov, spelled.REPLACEMENTS[torch.cov]):
        with pytest.raises(RuntimeError, match=f"expected {name} to have (integral|floating point) dtype"):
            cov(X, **{name: weights})


def test_shapes_that_torch_accepts() -> None:
    for v in (V[:, :1], V[:1], V[:, 0], 0.5):
        got, want = (f(X, X + 1, v, reduction="none") for f in (spelled.gaussian_nll_loss, F.gaussian_nll_loss))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for classes, count in ((CLASSES[:0], 3), (CLASSES, 3), (CLASSES, -1)):
        assert torch.equal(spelled.one_hot(classes, count), F.one_hot(classes, count))


class Checked(nn.Module):
    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, x + 1, v)


def test_values_are_checked_when_the_graph_runs() -> None:
    x, v = torch.ones(3), torch.ones(3)
    graph = trace(Checked(), (x, v), train=False)
    assert any("_assert_async" in str(n.target) for n in graph.nodes)
    with pytest.raises(RuntimeError, match="negative"):
        graph.module(x, -v)


def test_the_first_error_is_reported_if_replacements_do_not_help() -> None:
    class Splits(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Any:
            return torch.tensor_split(x, n)

    with pytest.raises(TraceError, match="does not trace to one graph"):
        trace(Splits(), (torch.ones(6), torch.tensor(2)), train=False)
