"""Recomputes the values of a lowered graph so that each has a storage of its own, shared with its views.

Lowered graphs share one fake among all values with equal shapes (``local_graph``), so their storages say nothing about memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.passes.after_lowering.rewrite import copied


class _ValueRecorder(fx.Interpreter):
    """Stores each node's result in ``meta["val"]``."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value


def with_storages(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``module``, run once on fake CPU tensors."""
    found = copied(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode, torch.no_grad():
        values = [n.meta["val"] for n in found.graph.nodes if n.op == "placeholder"]
        _ValueRecorder(found).run(*(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values))
    return found
