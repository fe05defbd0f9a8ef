"""Budgets and parts of them."""

from __future__ import annotations

import time

from fxshard.solver.problem.budget import Budget


def test_a_part_charges_its_whole() -> None:
    whole = Budget(work_limit=100)
    part = whole.part(30)
    part.charge(20)
    assert (part.work_left, whole.work_left) == (10, 80)
    assert not part.spent
    part.charge(10)
    assert part.spent and not whole.spent
    assert whole.part(1000).work_left == 70


def test_a_part_of_an_unlimited_budget() -> None:
    whole = Budget()
    part = whole.part(5)
    part.charge(5)
    assert part.spent and not whole.spent and whole.work_left is None


def test_a_part_ends_with_the_time_of_its_whole() -> None:
    whole = Budget(time_limit=0.01)
    part = whole.part(1e9)
    time.sleep(0.02)
    assert part.spent and whole.spent and part.seconds_left == 0


def test_shares_are_of_the_work_left() -> None:
    whole = Budget(work_limit=100)
    first = whole.share(0.5)
    first.charge(20)
    second = whole.share(0.25)
    assert (first.work_left, second.work_left, whole.work_left) == (30, 20, 80)


def test_the_last_part_takes_no_more_than_the_grace() -> None:
    whole = Budget(time_limit=0.01, grace=10.0)
    part = whole.share(0.5)
    time.sleep(0.02)
    left, last = part.last().seconds_left, whole.last().seconds_left
    late = whole.part(1e9).share(0.5).last().seconds_left
    assert left is not None and last is not None and late is not None and late <= last
    assert left <= 5 < last <= 10
    assert Budget(work_limit=5).last().work_left is None and Budget(work_limit=5).last(7).work_left == 7


def test_an_ended_budget_can_be_renewed() -> None:
    budget = Budget(work_limit=5)
    budget.end()
    assert budget.spent and budget.work_left == 0 and budget.anew().work_left == 5
