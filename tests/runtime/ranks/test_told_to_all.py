"""Which ranks raise the error of a meeting: its own, and no others, so that those still have to be told."""

from __future__ import annotations

import torch.distributed as dist

from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.ranks.agreement import Group, told_to_all
from fxshard.runtime.ranks.launch import share_plan
from tests.plans.small_plans import small_plan
from tests.runtime.ranks.test_launch import run_ranks


def test_an_error_of_two_ranks_is_not_told_to_a_third() -> None:
    def fail() -> ShardingPlan:
        raise ZeroDivisionError

    found = run_ranks((0, 1), lambda group: share_plan(fail if group.rank == 0 else small_plan, group=group, timeout=600.0))
    assert isinstance(found[0], ZeroDivisionError)
    for rank, error in found.items():
        for ranks, told in (((0, 1), True), ((0, 1, 2), False)):
            assert told_to_all(error, Group(dist.HashStore(), rank, ranks)) is told, (rank, ranks)
    assert not told_to_all(ZeroDivisionError(), Group(dist.HashStore(), 0, (0, 1)))
