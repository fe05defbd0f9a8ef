"""What a start from the cache does not need is not imported; while the rest is, no cycles of objects are looked for."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from fxshard.collecting import no_collections
from tests.cycles import cycle

CHILD = """
import sys
import fxshard
seen = []
import gc
gc.callbacks.append(lambda phase, info: seen.append(phase))
fxshard.parallelize
searches = len(seen)
gc.callbacks.clear()
late = "fxshard.solver", "fxshard.api", "highspy", "torch._inductor.debug"
assert searches == 0 and gc.isenabled(), searches
assert not [name for name in late if name in sys.modules]
from fxshard.passes.planning import choose
assert "fxshard.solver.primal.highs" in sys.modules and "highspy" not in sys.modules
assert fxshard.plan and fxshard.api.parallelize is fxshard.parallelize
print("done")
"""


def test_a_front_door_without_what_it_need_not_have() -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=240)
    assert ran.stdout == "done\n", ran.stderr


def test_no_cycles_are_looked_for_while_importing_and_all_are_afterwards() -> None:
    with pytest.raises(ImportError), no_collections():
        assert not gc.isenabled()
        young = cycle()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect(1)
    assert young() is not None, "what was made meanwhile counts as old"
    gc.collect()
    assert young() is None


def test_a_user_who_looks_for_none_or_has_set_objects_aside_is_left_alone() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    aside = cycle()
    gc.freeze()
    try:
        with no_collections():
            pass
        gc.collect()
        assert aside() is not None and gc.isenabled()
    finally:
        gc.unfreeze()
    gc.collect()
    assert aside() is None
