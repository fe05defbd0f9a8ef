"""Modules that are imported only when used. Each test runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = ("networkx", "torch.distributed.tensor.experimental", "fxshard.archive.graphs", "fxshard.solver")
PARALLELIZE = f"""
import sys, fxshard
assert fxshard.parallelize
print([name for name in {LEFT_OUT!r} if name in sys.modules])
"""
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
    [(PARALLELIZE, "[]"), (NETWORKX_LATER, "True [1, 2, 3] True"), (NETWORKX_BEFORE, "True")],
    ids=["parallelize", "networkx later", "networkx before"],
)
def test_what_a_fresh_process_imports(program: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == said, done.stderr
