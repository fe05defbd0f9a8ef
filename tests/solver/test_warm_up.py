"""``warm_up`` compiles every loop of the solver, before any time limit runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USED = """
import sys
import numpy as np
from fxshard.solver import Budget, NoPlanError, Session, warm_up
from tests.solver.problems import grid

def compiled():
    loops = [v for name, m in list(sys.modules.items()) if name.startswith("fxshard.solver") for v in vars(m).values()]
    return {(loop.__name__, str(one)) for loop in loops if hasattr(loop, "signatures") for one in loop.signatures}

if sys.argv[1] == "warm":
    warm_up()
before = compiled()
for memory in (False, True):
    problem = grid(3, 4, 3, 0, transfers=True, memory=memory)
    try:
        Session(problem, Budget(work_limit=1e7)).again({0: np.arange(3) > 0})
    except NoPlanError:
        pass
print(len(compiled() - before))
"""


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_after_a_warm_up_nothing_is_left_to_compile(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", USED, how], cwd=ROOT, check=True, capture_output=True, text=True)
    assert (int(done.stdout) == 0) == (how == "warm")
