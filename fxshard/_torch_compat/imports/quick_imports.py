"""Private names of torch (2.13): import Dynamo and AOTAutograd without parts that only their error messages and plots need.

A sixth of their import time goes into recording the source file of each operator that torch registers (a search through all modules), and
into networkx, which AOTAutograd's partitioner uses to draw graphs and to evaluate checkpointing.

What would replace it: ``import torch``, were these parts imported on use.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fxshard._torch_compat.imports.sources import quick_sources

CHECKPOINTING = "torch._functorch._activation_checkpointing"
READERS = ("graph_info_provider", "knapsack_evaluator", "min_cut")
"""Modules of CHECKPOINTING that import networkx, the last one from torch 2.15 on; at import time they need only the name ``DiGraph``."""


class Later(ModuleType):
    """A proxy for a module that is imported on first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Within it, Dynamo and AOTAutograd are imported faster."""
    with quick_sources():
        _postpone_networkx()
        yield


def _postpone_networkx() -> None:
    """Imports the modules that use networkx without it. Does nothing if it is imported already, or another thread might import it."""
    if "networkx" in sys.modules or threading.active_count() > 1:
        return
    stub = ModuleType("networkx")
    vars(stub)["DiGraph"] = Any
    sys.modules["networkx"] = stub
    try:
        readers = [import_module(f"{CHECKPOINTING}.{name}") for name in READERS if find_spec(f"{CHECKPOINTING}.{name}")]
    finally:
        del sys.modules["networkx"]
    for reader in readers:
        vars(reader)["nx"] = Later("networkx")
