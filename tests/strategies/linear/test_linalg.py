"""Linear algebra: batches of matrices can be sharded, and so can the right-hand sides of a system."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real
from tests.strategies.shards import check

aten = torch.ops.aten
M = real(5, 3, 3)
SPD = M @ M.mT + 3 * torch.eye(3, dtype=torch.float64)
B = real(5, 3, 4)
L = aten.linalg_cholesky_ex(SPD)[0]
LU, PIVOTS, _ = aten.linalg_lu_factor_ex(SPD)
LD, LD_PIVOTS, _ = aten.linalg_ldl_factor_ex(SPD)
Q, TAU = aten.geqrf(M)

FACTORED = "linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet _linalg_svd _linalg_eigh linalg_eig _linalg_eigvals linalg_qr"
FACTORED += " geqrf linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex linalg_matrix_exp cholesky_inverse"


@pytest.mark.parametrize(
    ("op", "args"),
    [(op, (SPD,)) for op in FACTORED.split()]
    + [("_linalg_svd", (M, False, False)), ("_linalg_eigh", (SPD, "L", False)), ("linalg_qr", (M, "r"))]
    + [("lu_unpack", (LU, PIVOTS)), ("linalg_householder_product", (Q, TAU)), ("ormqr", (Q, TAU, B))],
)
def test_matrices(op: str, args: tuple[Any, ...]) -> None:
    cut = {s for s in check(f"aten.{op}.default", *args) if "S" in s}
    assert len(cut) == 1 and next(iter(cut)).startswith("S(0)")


SYSTEMS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "triangular": ("linalg_solve_triangular", (L, B), {"upper": False}, "R, S(2) -> S(2)"),
    "triangular, right": ("linalg_solve_triangular", (L, B.mT.contiguous()), {"upper": False, "left": False}, "R, S(1) -> S(1)"),
    "triangular, broadcast": ("linalg_solve_triangular", (L[0], B), {"upper": False}, "R, S(0) -> S(0)"),
    "triangular, batch of matrices": ("linalg_solve_triangular", (L, B[0]), {"upper": False}, "S(0), R -> S(0)"),
    "any": ("_linalg_solve_ex", (SPD, B), {}, "S(0), S(0) -> S(0), S(0), S(0), S(0)"),
    "any, side by side": ("_linalg_solve_ex", (SPD, B), {}, "R, S(2) -> S(2), R, R, R"),
    "any, right": ("_linalg_solve_ex", (SPD, B.mT.contiguous()), {"left": False}, "R, S(1) -> S(1), R, R, R"),
    "any, vectors": ("_linalg_solve_ex", (SPD, real(5, 3)), {}, "S(0), S(0) -> S(0), S(0), S(0), S(0)"),
    "any, one vector": ("_linalg_solve_ex", (SPD, real(3)), {}, "S(0), R -> S(0), S(0), S(0), S(0)"),
    "factored": ("linalg_lu_solve", (LU, PIVOTS, B), {}, "R, R, P -> P"),
    "factored, right": ("linalg_lu_solve", (LU, PIVOTS, B.mT.contiguous()), {"left": False}, "R, R, S(1) -> S(1)"),
    "symmetric": ("linalg_ldl_solve", (LD, LD_PIVOTS, B), {}, "S(0), S(0), S(0) -> S(0)"),
    "positive": ("cholesky_solve", (B, L), {}, "S(2), R -> S(2)"),
}


@pytest.mark.parametrize(("op", "args", "kwargs", "spec"), SYSTEMS.values(), ids=SYSTEMS)
def test_systems(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], spec: str) -> None:
    assert spec in check(f"aten.{op}.default", *args, **kwargs)
