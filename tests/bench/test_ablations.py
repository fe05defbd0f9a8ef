"""The ablation bench: every mechanism it names exists, and switching one off on a small anchor changes the right figures."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from bench.ablations.__main__ import main
from bench.ablations.anchors import ANCHORS, Anchor, Planned, Prepared
from bench.ablations.measure import UNUSED, Figures, cells
from bench.ablations.mechanism import Mechanism, together, used_of
from bench.ablations.mechanisms import MECHANISMS
from bench.ablations.steps import Compared, row
from fxshard.solver import PlacementProblem, solve

BY_NAME = {one.name: one for one in MECHANISMS}


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_every_mechanism_can_be_switched_off(mechanism: Mechanism) -> None:
    assert mechanism.lines >= 0
    with mechanism.switched_off(), used_of(MECHANISMS) as used:
        assert not used


def test_every_mechanism_has_an_anchor_of_its_stage() -> None:
    assert {one.of for one in MECHANISMS} == {one.of for one in ANCHORS} | {"step"}
    assert len(BY_NAME) == len(MECHANISMS) and len({one.name for one in ANCHORS}) == len(ANCHORS)


def _grid(data: object) -> Prepared:
    """A grid with random costs, in which some states are dominated."""
    rng = np.random.default_rng(0)
    pairs = tuple((i, j) for i in range(9) for j in (i + 1, i + 3) if j < 9)
    problem = PlacementProblem(tuple(rng.random((9, 4))), pairs, tuple(rng.random((len(pairs), 4, 4))))

    def solved() -> tuple[float, float]:
        solution = solve(problem)
        return solution.objective, solution.lower_bound

    return solved


def test_cells_have_figures_with_and_without_each_mechanism() -> None:
    base, without, other = cells(Anchor("grid", "solve", _grid), [BY_NAME["small degree"], BY_NAME["tied"]], None)
    assert isinstance(base.figures, Figures) and isinstance(without.figures, Figures)
    assert base.mechanism == "" and base.figures.gap == without.figures.gap == 0
    assert base.figures.objective == without.figures.objective and base.figures.work < without.figures.work
    assert other.figures is None and other.reason == UNUSED


def test_a_cell_that_fails_says_why() -> None:
    broken = Mechanism("broken", "solve", "", {"fxshard.solver.reductions.degree.EliminateSmallDegree.apply": lambda *_: 1 / 0})
    _, cell = cells(Anchor("grid", "solve", _grid), [broken], None)
    assert cell.figures is None and cell.reason.startswith("ZeroDivisionError")


def test_table_of_one_mechanism_and_one_anchor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--anchors", "perceptron, 0.6 of memory", "--only", "dominance", "--list"]) == 0
    assert "dominance" in (said := capsys.readouterr().out) and "perceptron, 0.6 of memory" in said


def test_memory_limits_are_fractions_of_the_unlimited_plan() -> None:
    from bench.ablations.anchors import perceptron

    planned = Planned(perceptron, "dp=2", "cpu", {"optimizer": "adamw"}, limit=0.9, work=1e7)
    objective, bound = planned(None)()
    assert 0 < bound <= objective


def test_mechanisms_of_a_stage_are_switched_off_together() -> None:
    one, lowered = together([BY_NAME["small degree"], BY_NAME["dominance"], BY_NAME["bucket"]])
    assert one.name == "small degree + dominance" and lowered.name == "bucket"
    assert one.lines == BY_NAME["small degree"].lines + BY_NAME["dominance"].lines
    base, without = cells(Anchor("grid", "solve", _grid), [one], None)
    assert base.figures is not None and without.figures is not None
    assert base.figures.objective == without.figures.objective and base.figures.work < without.figures.work


def test_steps_are_shown_as_medians_and_their_middle_half() -> None:
    shown = row(Compared("one", (1.0, 2.0, 3.0, 4.0), (0.5,), 1.0, 1.25), 7)
    assert shown == ("one", 7, "2.500 (1.250 to 3.750)", "0.500", "1.25")


FORK = """
import gc
import torch.distributed as dist
from bench.ablations import measure

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cycle = {"group": dist.new_group([0])}
cycle["itself"] = cycle
dist.destroy_process_group()
del cycle
print(*measure._in_fork(lambda send: send(f"collected {gc.collect() >= 0}")))
"""


def test_a_fork_does_not_end_groups_of_its_parent() -> None:
    """The end of a group of gloo's waits for its threads, which only the parent has."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout == "collected True\n", done.stderr
