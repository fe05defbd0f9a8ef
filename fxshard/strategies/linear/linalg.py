"""Linear algebra on matrices: the last two dims stay whole, all batch dims can be sharded.

The right-hand sides j of a system, x[:, j] = a^-1 b[:, j], can be sharded too; the solution is linear in b.
"""

from __future__ import annotations

from collections.abc import Callable

from fxshard.graph.call import Call, TensorMeta
from fxshard.strategies.engine.factors import Factors, Name, Rule, factors, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.linear.matmul import addmm
from fxshard.strategies.tensors.pointwise import aten_names


def matrices(call: Call) -> Factors:
    """All tensors have the batch dims of the first, except outputs without elements."""
    batch = call.operands[0].ndim - 2

    def of(meta: TensorMeta | None, index: int) -> list[Name] | None:
        if meta is None:
            return None
        count = batch if meta.ndim >= batch and 0 not in meta.shape else 0
        return [f"b{d}" if d < count else f"m{index}_{d}!" for d in range(meta.ndim)]

    ins = [of(meta, i) or [] for i, meta in enumerate(call.operands)]
    outs = [of(meta, len(ins) + o) for o, meta in enumerate(call.outputs)]
    empty = [o is not None and 0 in o.shape for o in call.outputs]
    depends = tuple(() if e else tuple(range(len(ins))) for e in empty)
    return factors(ins, outs, depends=depends)


def solved(matrix: int, side: int, left: Callable[[Call], bool]) -> Rule:
    """a x = b, or x a = b unless ``left``; batch dims broadcast. ``matrix``: operand of a or its factorisation; ``side``: operand of b."""

    def solve(call: Call) -> Factors:
        (out, *others), of = call.outputs, {matrix: call.operands[matrix], side: call.operands[side]}
        assert out is not None
        vector = of[side].ndim == 1 or (of[side].ndim == of[matrix].ndim - 1 and of[side].shape == of[matrix].shape[:-1])
        tail: list[Name] = ["n!"] if vector else ["n!", "k"] if left(call) else ["k", "n!"]
        batch = [f"b{d}" for d in range(out.ndim - len(tail))]

        def named(meta: TensorMeta, kept: list[Name]) -> list[Name]:
            count = meta.ndim - len(kept)
            return [*batch[len(batch) - count :], *kept]

        kept: dict[int, list[Name]] = {side: tail, matrix: ["n!", "m!"]}
        ins = [named(meta, kept.get(i, ["pivot!"])) for i, meta in enumerate(call.operands)]
        outs = [[*batch, *tail], *(None if o is None else _factorisation(o, batch, of[matrix]) for o in others)]
        depends = (tuple(range(len(ins))), *((matrix,) for _ in others))
        return factors(ins, outs, depends=depends, linear=linear_groups(call, [(side,)]) if not others else ())

    return solve


def _factorisation(meta: TensorMeta, batch: list[str], matrix: TensorMeta) -> list[Name]:
    """Dims of an output that depends on the matrix only: its factors, pivots or status."""
    count = matrix.ndim - 2
    return [*batch[len(batch) - count :], *(f"f{d}!" for d in range(meta.ndim - count))]


def _always(call: Call) -> bool:
    return True


def _left(call: Call) -> bool:
    return bool(call.arg(len(call.args), "left", True))


register(
    aten_names(
        "cholesky linalg_cholesky_ex cholesky_inverse linalg_inv_ex _linalg_det _linalg_slogdet _linalg_svd _linalg_eigh linalg_eig "
        "_linalg_eigvals linalg_qr geqrf ormqr linalg_householder_product linalg_lu linalg_lu_factor_ex lu_unpack "
        "linalg_ldl_factor_ex linalg_matrix_exp"
    ),
    matrices,
)
register(aten_names("linalg_solve_triangular"), solved(0, 1, _left))
register(aten_names("_linalg_solve_ex"), solved(0, 1, _left))
register(aten_names("linalg_lu_solve"), solved(0, 2, _left))
register(aten_names("linalg_ldl_solve"), solved(0, 2, _always))
register(aten_names("cholesky_solve triangular_solve"), solved(1, 0, _always))
register(aten_names("addr"), addmm("m", "n", "m n"))
register(aten_names("addbmm"), addmm("b m k", "b k n", "m n"))
