"""The solver chooses how attention sees a sharded sequence by cost: all-to-all to heads, gathered keys, or a ring. Costs are those of a
pencil: four devices, 1 TFLOP/s, 100 GB/s of memory, 10 GB/s links of 1 us, 5 us a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxshard
from fxshard.errors import ConstraintError
from fxshard.mesh.hardware import Hardware, Link
from fxshard.plans.plan_json import dumps, loads
from fxshard.plans.sharding_plan import ShardingPlan

FLOPS, MEMORY, LINK, HOP, LAUNCH, N = 1e12, 1e11, 1e10, 1.0, 5.0, 4
DIM, BYTES = 64, 4


class Attend(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def planned(heads: int, length: int, causal: bool, overlap: float, **options: Any) -> ShardingPlan:
    hardware = Hardware("pencil", {BYTES: FLOPS}, MEMORY, LAUNCH, N, Link(LINK, HOP), None, overlap=overlap)
    q = torch.empty(1, heads, length, DIM, device="meta")
    mesh = fxshard.Mesh({"cp": N}, hardware=hardware)
    return fxshard.plan(Attend(causal), (q, q, q), mesh, train=False, input_layouts="S(2)", output_layouts="S(2)", **options)


def attention(plan: ShardingPlan) -> tuple[str, str]:
    """The layouts of queries and keys."""
    spec = next(n.spec for n in plan.nodes if n.op == "fxshard.sdpa.default")
    return str(spec.inputs[0]), str(spec.inputs[1])


def sending(hops: int, sent: float) -> float:
    """Microseconds of a collective in which each rank sends ``sent`` bytes."""
    return LAUNCH + hops * HOP + sent / LINK * 1e6


def shard(heads: int, length: int) -> float:
    """Bytes of a rank's shard of q, k or v."""
    return heads * length / N * DIM * BYTES


def scores(heads: int, length: int, causal: bool) -> float:
    """Microseconds of the products q k^T and (.) v on the last rank of a sharded sequence."""
    rows = length / N
    seen = rows * (length - rows / 2) if causal else rows * length
    return 2 * 2 * heads * DIM * seen / FLOPS * 1e6


def merge(heads: int, length: int) -> float:
    """Microseconds to read two results of q's size and write one."""
    return 3 * shard(heads, length) / MEMORY * 1e6


def all_to_all(heads: int, length: int, causal: bool) -> float:
    """Heads are the first dim of several elements, so blocks of heads adjoin and those of the sequence do not: a copy of each of q, k, v
    after its exchange, and of the result before it."""
    products = 2 * 2 * heads / N * DIM * length**2 * (0.5 if causal else 1.0) / FLOPS * 1e6
    copies = 4 * 2 * shard(heads, length) / MEMORY * 1e6
    return products + 4 * sending(N - 1, shard(heads, length) * (N - 1) / N) + copies


def gathered(heads: int, length: int, causal: bool) -> float:
    gathers = 2 * sending(N - 1, shard(heads, length) * (N - 1))
    return scores(heads, length, causal) + gathers + causal * merge(heads, length)


def ring(heads: int, length: int, causal: bool, overlap: float) -> float:
    """Each of N - 1 shifts of k and v runs beside a block of products. Under a causal mask, blocks are dealt head-to-tail before and after:
    k and v together, q, out and logsumexp, each copied twice (read and written) on each side; all ranks then do half of the products."""
    products = 2 * 2 * heads * DIM * length * length / N / FLOPS * 1e6 * (0.5 if causal else 1.0)
    shift = sending(1, 2 * shard(heads, length))
    hidden = (N - 1) * overlap * min(shift, products / N)
    dealt = [2 * shard(heads, length), *[shard(heads, length)] * 2, shard(heads, length) / DIM]
    dealing = sum(sending(1, size) + 4 * size / MEMORY * 1e6 for size in dealt)
    return products + (N - 1) * (shift + merge(heads, length)) - hidden + causal * dealing


def ring_in_order(heads: int, length: int, overlap: float) -> float:
    """A causal ring without head-to-tail balance: the last rank sets the pace, and its first block is the half on the diagonal."""
    products, shift = scores(heads, length, True), sending(1, 2 * shard(heads, length))
    block = products / (N - 0.5)
    hidden = overlap * (min(shift, block / 2) + (N - 2) * min(shift, block))
    return products + (N - 1) * (shift + merge(heads, length)) - hidden


@pytest.mark.parametrize(
    ("heads", "length", "causal", "overlap", "wanted"),
    [
        (8, 4096, True, 0.8, "all-to-all"),  # heads divide: nobody waits for the last rank
        (8, 4096, False, 0.0, "all-to-all"),
        (1, 16384, True, 0.8, "ring"),  # one head: only the sequence can be sharded, and keys travel beside the products
        (1, 16384, False, 0.8, "ring"),
        (1, 1024, True, 0.0, "gathered"),  # nothing is hidden: two collectives instead of three, one merge instead of three
        (1, 1024, False, 0.0, "gathered"),
    ],
)
def test_the_cheapest_form_wins(heads: int, length: int, causal: bool, overlap: float, wanted: str) -> None:
    plan = planned(heads, length, causal, overlap)
    costs = {"gathered": gathered(heads, length, causal), "ring": ring(heads, length, causal, overlap)}
    if heads % N == 0:
        costs["all-to-all"] = all_to_all(heads, length, causal)
    assert min(costs, key=costs.__getitem__) == wanted, costs
    assert plan.objective == pytest.approx(costs[wanted]) and plan.gap == 0
    layouts = {"all-to-all": ("S(1)", "S(1)"), "gathered": ("S(2)", "R"), "ring": ("S(2)", "S(2)")}
    assert attention(plan) == layouts[wanted]


def test_a_length_that_cannot_be_dealt_keeps_its_order() -> None:
    """16380 is a multiple of 4 ranks, but not of 8 blocks."""
    plan = planned(1, 16380, True, 0.8)
    assert attention(plan) == ("S(2)", "S(2)")
    assert plan.objective == pytest.approx(ring_in_order(1, 16380, 0.8))
    assert ring_in_order(1, 16380, 0.8) > 1.5 * ring(1, 16384, True, 0.8)


def test_bytes_of_a_ring_count() -> None:
    """As objective, in the plan's entries, and in a limit: keys are sent once around the ring, or gathered."""
    sent = 2 * shard(1, 1020) * (N - 1)
    assert planned(1, 1020, True, 0.0, objective="communication").objective == sent
    plan = planned(1, 16384, False, 0.8)
    assert attention(plan) == ("S(2)", "S(2)")
    one = ("shift", "cp", (2, 1, 1, 4096, DIM), 2 * shard(1, 16384))
    assert [(c.kind, c.axis, c.buffer, c.bytes) for c in plan.collectives] == [one] * 3
    limit = fxshard.Communication("cp", at_most=6 * shard(1, 16384))
    assert planned(1, 16384, False, 0.8, constraints=[limit]).objective == plan.objective
    with pytest.raises(ConstraintError, match="cannot hold together"):
        planned(1, 16384, False, 0.8, constraints=[replace(limit, at_most=limit.at_most - 1)])


def test_a_ring_in_files_and_words() -> None:
    plan = planned(1, 16384, False, 0.8)
    assert loads(ShardingPlan, dumps(plan), "plan.json") == plan
    text = str(plan.why_collective(1))
    assert "shift on cp" in text and "2 of the 3 collectives of the node itself" in text and "fxshard.sdpa.default" in text
    assert "shift" in fxshard.inspect.collectives_table(plan)
