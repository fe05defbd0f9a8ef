"""StoredModules: the graphs are read once, whichever threads ask for them first; a cached_property has no lock from Python 3.12 on."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import fx, nn

from fxshard.program.sharded_program import SizeClass, StoredModules

KEY: SizeClass = ((1,),)
THREADS = 4


def test_threads_read_once() -> None:
    reads, together = [], threading.Barrier(THREADS)

    def read() -> Mapping[SizeClass, fx.GraphModule]:
        reads.append(1)
        time.sleep(0.05)  # so that the others come meanwhile
        return {KEY: fx.GraphModule(nn.Module(), fx.Graph())}

    modules = StoredModules([KEY], "hash", read)

    def ask(_: int) -> fx.GraphModule:
        together.wait()
        return modules[KEY]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, range(THREADS)))
    assert len(reads) == 1 and all(one is found[0] for one in found)
    assert list(copy.copy(modules).values()) == found[:1]


def test_a_read_that_fails_is_repeated() -> None:
    def read() -> Mapping[SizeClass, fx.GraphModule]:
        raise ValueError("the file is damaged")

    modules = StoredModules([KEY], "hash", read)
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            modules[KEY]
