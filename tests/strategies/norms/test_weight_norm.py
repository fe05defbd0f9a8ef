"""Weight norm, over all dims but the first or the last."""

from __future__ import annotations

import pytest

from tests.strategies.samples import positive, real
from tests.strategies.shards import check


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 1, 1)), (2, (1, 1, 5))])
def test_only_the_kept_dim_can_be_sharded(dim: int, shape: tuple[int, ...]) -> None:
    v, kept = real(4, 3, 5), f"S({dim})"
    specs = check("aten._weight_norm_interface.default", v, real(*shape), dim)
    assert specs == {"R, R -> R, R", f"{kept}, {kept} -> {kept}, {kept}"}
    specs = check("aten._weight_norm_interface_backward.default", real(4, 3, 5), v, real(*shape), positive(*shape), dim)
    assert {f"{kept}, {kept}, {kept}, {kept} -> {kept}, {kept}", "P, R, R, R -> P, P"} <= specs
    assert not any(s.startswith("S(1)") for s in specs)
