"""Budgets and parts of them."""

from __future__ import annotations

import time

from fxshard.solver.budget import Budget


def test_a_part_charges_its_whole() -> None:
    whole = Budget(work_limit=100)
    part = whole.part(30)
    part.charge(20)
    assert (part.work_left, whole.work_left) == (10, 80)
    assert not part.spent
    part.charge(10)
    assert part.spent and not whole.spent
    assert whole.part(1000).work_left == 70


def test_a_part_of_what_has_no_limit() -> None:
    whole = Budget()
    part = whole.part(5)
    part.charge(5)
    assert part.spent and not whole.spent and whole.work_left is None


def test_a_part_ends_with_the_time_of_its_whole() -> None:
    whole = Budget(time_limit=0.01)
    part = whole.part(1e9)
    time.sleep(0.02)
    assert part.spent and whole.spent and part.seconds_left == 0
