"""Results computed once per array, and reused."""

from __future__ import annotations

import numpy as np

from fxshard.solver.problem.arrays import each, remembered


def test_each_calls_once_per_array_object() -> None:
    one, other = np.arange(3.0), np.arange(3.0)
    asked: list[int] = []

    def make(array: np.ndarray) -> float:
        asked.append(id(array))
        return float(array.sum())

    assert each([one, other, one], make) == [3.0, 3.0, 3.0]
    assert asked == [id(one), id(other)]


def test_remembered_returns_the_same_result_and_keeps_its_arguments_alive() -> None:
    add = remembered(np.add)
    one = np.arange(3.0)
    assert add(one, one) is add(one, one)
    assert len({float(add(np.full(1, float(k)), one[:1])[0]) for k in range(50)}) == 50  # freed arrays would leave their ids to new ones
