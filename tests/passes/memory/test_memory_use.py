"""Memory of redistributed copies depends on how a value lies in memory: values of equal shapes share no result if their strides differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx

from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import bytes_price
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.memory.memory_use import MemoryUse

ENDS = tuple(tuple(map(Layout.parse, layouts)) for layouts in (("R", "S(0)", "S(1)"), ("S(1)", "R", "S(0)")))
VALUES = {"rows": torch.empty(24, 12, device="meta"), "columns": torch.empty(12, 24, device="meta").t()}


def memory_use() -> MemoryUse:
    """Of a mesh and prices alone, with an empty cache."""
    prices: Any = SimpleNamespace(extent=lambda value: (tuple(value.meta["val"].shape), value.meta["val"].dtype.itemsize))
    nothing: Any = None
    return MemoryUse(nothing, Mesh({"a": 4}), nothing, IdentityCache(), {}, {}, bytes_price, prices)


def copies(use: MemoryUse, name: str) -> np.ndarray:
    """(2, given, wanted) bytes that moving needs for a moment, and those of the copy."""
    node = fx.Graph().placeholder(name)
    node.meta["val"] = VALUES[name]
    return np.stack([use.moving_bytes(node, ENDS), use.moved_bytes(node, ENDS)[0]])


def test_a_transposed_value_has_its_own_memory() -> None:
    alone = {name: copies(memory_use(), name) for name in VALUES}
    assert (alone["rows"] != alone["columns"]).any(), "what is not dense is copied first"
    for names in (list(VALUES), list(reversed(VALUES))):
        use = memory_use()
        for name in names:
            np.testing.assert_array_equal(copies(use, name), alone[name])
