"""A start from the cache imports no more than it needs, and Python's cycle collector does not run during imports."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys
import fxshard
seen = []
import gc
gc.callbacks.append(lambda phase, info: seen.append(phase))
fxshard.parallelize
searches = len(seen)
gc.callbacks.clear()
late = "fxshard.solver", "fxshard.api", "fxshard.archive.graphs", "highspy", "numba", "networkx"
late += "torch._inductor.debug", "torch.distributed.tensor.experimental"
assert searches == 0 and gc.isenabled(), searches
assert not [name for name in late if name in sys.modules]
from fxshard.passes.planning import choose
assert "fxshard.solver.primal.highs" in sys.modules and "highspy" not in sys.modules
assert fxshard.plan and fxshard.api.parallelize is fxshard.parallelize
print("done")
"""


def test_imports_of_a_start_from_the_cache() -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=240)
    assert ran.stdout == "done\n", ran.stderr
