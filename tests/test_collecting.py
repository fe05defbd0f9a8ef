"""Python's cycle collector runs seldom while passes run and modules are imported, and as usual afterwards.

Each test runs in a process of its own: a collection of the objects of other tests would take seconds.
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


def objects_from_before_a_pass_are_not_collected_during_it() -> None:
    """Cycles made during the pass are, and afterwards all are again."""
    old = cycle()
    with few_collections():
        young = cycle()
        gc.collect()
        assert old() is not None and young() is None and gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def objects_that_a_user_froze_stay_frozen() -> None:
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


def frozen_objects_are_counted_once() -> None:
    """Counting visits all of them. Where there are none it costs nothing, and must be done each time."""
    counted, real = [], gc.get_freeze_count
    gc.get_freeze_count = lambda: counted.append(real()) or counted[-1]
    for _ in range(2):
        with few_collections(), few_collections():
            assert real() > 0
    assert counted == [0, 0]
    gc.freeze()
    for _ in range(2):
        with few_collections():
            pass
    assert real() > 0 and counted == [0, 0, counted[-1]]


def nothing_is_collected_during_imports_and_everything_afterwards() -> None:
    with pytest.raises(ImportError), no_collections():
        assert not gc.isenabled()
        young = cycle()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect(1)
    assert young() is not None, "objects made during imports are in the oldest generation"
    gc.collect()
    assert young() is None


def a_user_who_disabled_collection_or_froze_objects_is_respected() -> None:
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
    objects_from_before_a_pass_are_not_collected_during_it,
    objects_that_a_user_froze_stay_frozen,
    frozen_objects_are_counted_once,
    nothing_is_collected_during_imports_and_everything_afterwards,
    a_user_who_disabled_collection_or_froze_objects_is_respected,
)


@pytest.mark.parametrize("name", [claim.__name__ for claim in CLAIMS])
def test_in_a_process_of_its_own(name: str) -> None:
    code = f"from tests.test_collecting import {name}; {name}(); print('done')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.stdout == "done\n", ran.stderr
