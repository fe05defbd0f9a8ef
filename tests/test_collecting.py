"""Python's search for cycles of objects, rare while passes run and modules are imported, and afterwards as before.

Each claim is checked in a process of its own: a search through all that other tests have left takes seconds.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from fxshard.collecting import few_collections, no_collections
from tests.cycles import cycle

ROOT = Path(__file__).resolve().parents[1]


def what_was_there_before_a_pass_is_not_looked_through_in_it() -> None:
    """Cycles made in the pass are; afterwards all are again."""
    old = cycle()
    with few_collections():
        young = cycle()
        gc.collect()
        assert old() is not None and young() is None and gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def what_a_user_has_set_aside_stays_so() -> None:
    aside = cycle()
    gc.freeze()
    try:
        with few_collections():
            gc.collect()
        gc.collect()
        assert aside() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert aside() is None


def no_cycles_are_looked_for_while_importing_and_all_are_afterwards() -> None:
    with pytest.raises(ImportError), no_collections():
        assert not gc.isenabled()
        young = cycle()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect(1)
    assert young() is not None, "what was made meanwhile counts as old"
    gc.collect()
    assert young() is None


def a_user_who_looks_for_none_or_has_set_objects_aside_is_left_alone() -> None:
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


CLAIMS = (
    what_was_there_before_a_pass_is_not_looked_through_in_it,
    what_a_user_has_set_aside_stays_so,
    no_cycles_are_looked_for_while_importing_and_all_are_afterwards,
    a_user_who_looks_for_none_or_has_set_objects_aside_is_left_alone,
)


@pytest.mark.parametrize("name", [claim.__name__ for claim in CLAIMS])
def test_in_a_process_of_its_own(name: str) -> None:
    code = f"from tests.test_collecting import {name}; {name}(); print('done')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.stdout == "done\n", ran.stderr
