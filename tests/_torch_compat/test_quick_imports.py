"""networkx is imported only when used, also by torch. Each test runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

NETWORKX_LATER = """
import fxshard._torch_compat, sys
from torch._functorch._activation_checkpointing import graph_info_provider as provider, knapsack_evaluator as evaluator
assert "networkx" not in sys.modules
graph = provider.nx.DiGraph([(1, 2), (2, 3)])
import networkx
print(type(graph) is networkx.DiGraph, list(evaluator.nx.topological_sort(graph)), networkx.__file__ is not None)
"""
NETWORKX_BEFORE = """
import networkx, fxshard._torch_compat
from torch._functorch._activation_checkpointing import graph_info_provider as provider
print(provider.nx is networkx)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(NETWORKX_LATER, "True [1, 2, 3] True"), (NETWORKX_BEFORE, "True")],
    ids=["networkx later", "networkx before"],
)
def test_what_a_fresh_process_imports(program: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == said, done.stderr
