"""Numbers computed from sizes, tables sliced by a size, lengths of 1: on two ranks few programs give the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.export import Dim
from torch.nn import functional as F

from examples.llama import Llama
from tests.distributed.scenarios import run_scenarios, two_ranks
from tests.distributed.sizes.test_any_size import made, pair, rows, same, step

pytestmark = pytest.mark.distributed


class Then(nn.Module):
    """A linear layer, then ``function``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def at_most_three(function: Callable[[Tensor], Tensor], sizes: Sequence[int] = (4, 6, 10, 7, 1)) -> None:
    sharded, single = pair(Then(function).double(), rows(8), input_layouts="S(0)")
    for size in sizes:
        same(sharded, single, rows(size))
    assert made(sharded) <= 3, [str(guard) for program in sharded.forward.programs for guard in program.guards]  # type: ignore[union-attr]


def divided_and_roots() -> None:
    at_most_three(lambda y: y * (1 / y.shape[0]) + y / y.shape[0] ** 0.5)


def variances() -> None:
    at_most_three(lambda y: y.var(0, correction=0))


def deviations_of_one_row() -> None:
    """The result is nan, as on one device: the gradient divides by zero."""
    sharded, single = pair(Then(lambda y: y.std(0)).double(), rows(8), input_layouts="S(0)")
    for size in (4, 7, 1):
        (loss, grads), (want, wanted) = step(sharded, rows(size)), step(single, rows(size))
        assert loss.isnan() == (size == 1)
        torch.testing.assert_close([loss, *grads], [want, *wanted], rtol=1e-9, atol=1e-9, equal_nan=True)
    assert made(sharded) <= 3


def rounded() -> None:
    at_most_three(lambda y: y[: int(y.shape[0] * 0.5)] * y.shape[0], (4, 6, 10, 7))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.weight[: x.shape[0]]


def tables() -> None:
    """Slices a table of 16 rows by a dynamic size of at most 16."""
    sharded, single = pair(Positions().double(), rows(8), dynamic_shapes={"x": {0: Dim("t", max=16)}}, constraints=())
    for size in (8, 4, 16, 5):
        same(sharded, single, rows(size))


def attention(y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(y[None], y[None], y[None], is_causal=True)[0]


def lengths_through_inductor() -> None:
    sharded, single = pair(Then(attention), tuple(x.float() for x in rows(8)), compiler="inductor", input_layouts="S(0)")
    for size in (7, 5, 1, 2):
        same(sharded, single, tuple(x.float() for x in rows(size)), tolerance=1e-5)
    assert made(sharded) <= 3


def llama_at_one() -> None:
    """Batches and lengths of 1 through Inductor: two programs serve all sizes, and torch's counters see one compilation."""

    def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(100 * batch + length)
        return torch.randint(0, 256, (batch, length), generator=draw), torch.randint(0, 256, (batch, length), generator=draw)

    dims: Any = {name: {0: "batch", 1: "seq"} for name in ("tokens", "targets")}
    torch.manual_seed(0)
    sharded, single = pair(Llama.small().float(), tokens(4, 16), compiler="inductor", input_layouts="S(0)", dynamic_shapes=dims)
    counters.clear()
    for size in ((3, 7), (1, 5), (5, 1), (1, 9), (2, 8), (1, 1)):
        same(sharded, single, tokens(*size), tolerance=1e-5)
    compiled = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
    assert made(sharded) == 2 and compiled <= 2, (made(sharded), compiled)


found, test_two_ranks = two_ranks(divided_and_roots, variances, deviations_of_one_row, rounded, tables, lengths_through_inductor)


@pytest.mark.slow
def test_llama_at_one(tmp_path: Path) -> None:
    said = run_scenarios({"llama": llama_at_one}, 2, tmp_path, seconds=600)
    assert not said["llama"], said["llama"]
