"""Nearest-neighbour resampling by whole factors becomes a repetition that any dim may shard; any other keeps torch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from tests.passes.tracing import Function, check_eager, real, targets

WHOLE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "factor": ((2, 3, 4, 6), {"scale_factor": 2}),
    "factors": ((2, 3, 4, 6), {"scale_factor": (3.0, 1)}),
    "size": ((2, 3, 4, 6), {"size": (8, 18)}),
    "exact": ((2, 3, 4), {"size": 12, "mode": "nearest-exact"}),
    "volume": ((1, 2, 2, 4, 4), {"scale_factor": 2.0, "recompute_scale_factor": True}),
}
OTHER: dict[str, dict[str, Any]] = {
    "no whole factor": {"scale_factor": 1.5},
    "smaller": {"size": (2, 3)},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
}


@pytest.mark.parametrize(("shape", "options"), WHOLE.values(), ids=WHOLE)
def test_whole_factors_repeat(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    graph, _ = check_eager(Function(lambda self, x: F.interpolate(x, **options)), real(*shape), plans=2)
    assert targets(graph) <= {f"aten.{op}.default" for op in ("view", "expand", "clone", "_unsafe_view", "reshape")} | {
        "aten.sum.dim_IntList",
        "aten.squeeze.dims",
    }
    (out,) = [n for n in graph.nodes if n.op == "output"]
    results = annotate(graph, Mesh({"a": 2})).specs[out.args[0][0].name]
    assert {f"S({d})" for d in range(len(shape)) if shape[d] > 1} <= {str(s.outputs[0]) for s in results}


@pytest.mark.parametrize("options", OTHER.values(), ids=OTHER)
def test_other_resampling_keeps_torchs_operators(options: dict[str, Any]) -> None:
    graph, _ = check_eager(Function(lambda self, x: F.interpolate(x, **options)), real(2, 3, 4, 6))
    assert "aten._unsafe_index.Tensor" in targets(graph)


def test_arguments_that_torch_refuses_are_refused() -> None:
    with pytest.raises(Exception, match="only one of size or scale_factor"):
        check_eager(Function(lambda self, x: F.interpolate(x, size=8, scale_factor=2)), real(2, 3, 4, 6))
