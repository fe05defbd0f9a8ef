"""Private names of torch (2.13): Dynamo and AOTAutograd imported without what only their errors and plots need.

Of the time that importing them takes, a sixth goes into noting the file of each operator that torch registers, for which it looks
through all modules, and into networkx, by which AOTAutograd's partitioner draws pictures and weighs checkpoints.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from fxshard._torch_compat.sources import quick_sources

READERS = ("graph_info_provider", "knapsack_evaluator")
"""Modules of ``torch._functorch._activation_checkpointing`` that import networkx, of which they only name ``DiGraph`` meanwhile."""


class Later(ModuleType):
    """Stands for a module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """While Dynamo and AOTAutograd are imported."""
    with quick_sources():
        _postpone_networkx()
        yield


def _postpone_networkx() -> None:
    """Imports what reads networkx without it. Not where it is imported already, or another thread might be about to."""
    if "networkx" in sys.modules or threading.active_count() > 1:
        return
    stub = ModuleType("networkx")
    vars(stub)["DiGraph"] = Any
    sys.modules["networkx"] = stub
    try:
        readers = [import_module(f"torch._functorch._activation_checkpointing.{name}") for name in READERS]
    finally:
        del sys.modules["networkx"]
    for reader in readers:
        vars(reader)["nx"] = Later("networkx")
