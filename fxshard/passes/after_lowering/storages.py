"""The values of a lowered graph made anew, each in a storage of its own that its views share.

Lowered graphs keep one fake for all values that look alike (``passes.local_graph``), which tells shapes, not what lies in which memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat import FakeTensorMode
from fxshard.passes.after_lowering.rewrite import copied


class _Anew(fx.Interpreter):
    """Keeps in ``meta["val"]`` what each node gives."""

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
        _Anew(found).run(*(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values))
    return found
