"""Orders of addition: gloo's and NCCL's rings against orders written out by hand; averages; unknown names."""

from __future__ import annotations

import pytest
import torch

from fxshard.errors import OptionError, RunError
from fxshard.runtime.simulate.reductions import check_reduction, gloo_chunk, reduce_tensors, scatter_tensors

# Written out for three ranks with one element per chunk; brackets show the order of additions.
HAND = {
    "exact": lambda x: [(x[0][c] + x[1][c]) + x[2][c] for c in range(3)],
    "gloo": lambda x: [(x[2][0] + x[1][0]) + x[0][0], (x[0][1] + x[2][1]) + x[1][1], (x[1][2] + x[0][2]) + x[2][2]],
    "nccl": lambda x: [(x[1][0] + x[2][0]) + x[0][0], (x[2][1] + x[0][1]) + x[1][1], (x[0][2] + x[1][2]) + x[2][2]],
}


@pytest.mark.parametrize("order", HAND)
def test_three_ranks_by_hand(order: str) -> None:
    """Six elements: gloo has two segments per chunk, so that they make three chunks, as for NCCL."""
    for seed in range(20):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
        want = torch.stack(HAND[order](x))
        have = reduce_tensors([r.repeat_interleave(2) for r in x], "sum", order)
        assert torch.equal(have, want.repeat_interleave(2))


def test_orders_differ_where_it_matters() -> None:
    x = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    assert reduce_tensors(x, "sum").item() == 0
    assert reduce_tensors(x, "sum", "gloo").item() == 1
    x = [torch.full((4, 4), 2.0**-8 if r else 1.0).bfloat16() for r in range(3)]
    assert reduce_tensors(x, "sum").unique().tolist() == [1.0]
    assert reduce_tensors(x, "sum", "nccl").unique().tolist() == [1.0, 1.0078125]


@pytest.mark.parametrize("order", ["exact", "gloo", "nccl"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3), (16,)])
def test_every_reduction_in_every_order(order: str, shape: tuple[int, ...]) -> None:
    x = [torch.randn(shape, dtype=torch.float64) for _ in range(5)]
    stacked = torch.stack(x)
    want = {"sum": stacked.sum(0), "avg": stacked.mean(0), "product": stacked.prod(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    for op, value in want.items():
        torch.testing.assert_close(reduce_tensors(x, op, order), value)


@pytest.mark.parametrize("order", ["exact", "gloo", "nccl"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_every_scattered_reduction(order: str, dtype: torch.dtype) -> None:
    """Each rank gets its block of the reduction, in the dtype of its input."""
    x = [torch.randint(0, 3, (6, 5), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)]
    stacked = torch.stack(x)
    want = {"sum": stacked.sum(0), "product": stacked.prod(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    want |= {"avg": stacked.mean(0)} if dtype.is_floating_point else {}
    for op, value in want.items():
        assert all(map(torch.equal, scatter_tensors(x, op, order), value.to(dtype).chunk(3)))


def test_chunk_sizes_of_real_gloo() -> None:
    """Measured on three processes with torch 2.13, from where a sum of 1, 1e8 and -1e8 is 1."""
    assert gloo_chunk(6, 4, 3) == 2
    assert gloo_chunk(1, 4, 3) == 2
    assert gloo_chunk(700_000, 4, 3) == 233_334
    assert gloo_chunk(2_000_000, 4, 3) == 666_669
    assert gloo_chunk(4_000_003, 4, 3) == 1_333_338
    assert gloo_chunk(4_000_003, 8, 3) == 1_333_343


def test_unknown_names() -> None:
    check_reduction("gloo")
    with pytest.raises(OptionError, match="unknown reduction 'glo'; did you mean 'gloo'") as error:
        check_reduction("glo")
    assert error.value.remedy
    with pytest.raises(OptionError, match="unknown reduction 3"):
        check_reduction(3)
    with pytest.raises(RunError, match="knows no reduction 'bxor'"):
        reduce_tensors([torch.ones(1)], "bxor")
