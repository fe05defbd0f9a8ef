"""Checks rules against operators: run shard by shard on simulated ranks, an operator must give its own result.

``check(op, *args)`` checks every option of one axis on 2, 3 and 4 ranks, ``check_mesh`` every spec on a mesh.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.utils import _pytree as pytree

import fxshard.ops  # noqa: F401
from fxshard.layout.layouts import Layout, local_offset, local_shape
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies import Call, Operand, TensorMeta, local_form, op_strategy, own_collectives

RANKS = (2, 3, 4)
COMMUNICATING = ("fxshard.sdpa.default", "fxshard.sdpa_backward.default")
"""Operators with a spec in which ranks communicate; tests of whole programs run it."""
QUICK = {torch.float64, torch.float32, torch.int64, torch.bool}
_MERGE = {"sum": sum, "avg": lambda p: sum(p) / len(p), "max": None, "min": None, "product": math.prod}


KERNELS: dict[str, Any] = {
    "aten.empty.memory_format": torch.ops.aten.zeros.default,
    "aten.empty_like.default": torch.ops.aten.zeros_like.default,
    "aten.empty_strided.default": lambda size, _: torch.zeros(size),
    "aten.new_empty_strided.default": lambda x, size, _: x.new_zeros(size),
    "aten.new_empty.default": torch.ops.aten.new_zeros.default,
}
"""Replacements for operators whose result is undefined or that have no CPU kernel."""


def find(op: str) -> Any:
    """The overload called ``op``."""
    return KERNELS.get(op) or functools.reduce(getattr, op.split("."), torch.ops)


def call_for(op: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any]) -> tuple[Call, list[torch.Tensor]]:
    """The ``Call`` of an operator on real tensors, and its operands."""
    tensors: list[torch.Tensor] = []

    def mark(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Operand(len(tensors) - 1)
        return value

    marked, named = pytree.tree_map(mark, (tuple(args), dict(kwargs)))
    call = Call(op, freeze(marked), tuple(sorted((k, freeze(v)) for k, v in named.items())), _metas(tensors), _metas(outputs))
    return call, tensors


def freeze(value: Any) -> Any:
    return tuple(freeze(v) for v in value) if isinstance(value, (list, tuple)) else value


def _metas(tensors: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(TensorMeta(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in tensors)


def as_outputs(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


class EagerContext:
    """A ``LocalContext`` that runs emitted operators at once, for the rank at ``coordinate``."""

    def __init__(self, call: Call, spec: OpSpec, shards: list[torch.Tensor], mesh: Sequence[int], coordinate: Sequence[int]):
        self.call, self.inputs, self.outputs = call, spec.inputs, spec.outputs
        self.mesh, self.coordinate = mesh, coordinate
        self.target = find(call.op)
        self.args, self.kwargs = pytree.tree_map(lambda a: shards[a.index] if isinstance(a, Operand) else a, (call.args, dict(call.kwargs)))

    def input_shape(self, operand: int) -> tuple[int, ...]:
        return local_shape(self.call.operands[operand].shape, self.inputs[operand], self.mesh, self.coordinate)

    def output_shape(self, output: int = 0) -> tuple[int, ...]:
        return local_shape(self.call.outputs[output].shape, self.outputs[output], self.mesh, self.coordinate)

    def input_offset(self, operand: int, dim: int) -> Any:
        return self._offset(self.call.operands[operand].shape, self.inputs[operand], dim)

    def output_offset(self, output: int, dim: int) -> Any:
        return self._offset(self.call.outputs[output].shape, self.outputs[output], dim)

    def _offset(self, shape: Any, layout: Layout, dim: int) -> Any:
        if not layout.axes_on(dim):
            return 0
        return torch.tensor(local_offset(shape, layout, self.mesh, self.coordinate)[dim])

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)


def run_spec(call: Call, tensors: list[torch.Tensor], spec: OpSpec, mesh: tuple[int, ...]) -> list[Any]:
    """Runs ``spec`` on every rank, and assembles whole outputs from the results."""
    pieces = [_distribute(t, layout, mesh) for t, layout in zip(tensors, spec.inputs, strict=True)]
    results = {c: _run_rank(call, spec, [p[c] for p in pieces], mesh, c) for c in _coordinates(mesh)}
    return [
        None if meta is None else assemble({c: r[i] for c, r in results.items()}, meta.shape, spec.outputs[i], mesh)
        for i, meta in enumerate(call.outputs)
    ]


def _coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


def _run_rank(call: Call, spec: OpSpec, shards: list[torch.Tensor], mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Any, ...]:
    """A rank with an empty shard does not run the operator: its outputs are empty, or the identity of the pending reduction."""
    ctx = EagerContext(call, spec, shards, mesh, coordinate)
    shapes = [None if o is None else ctx.output_shape(i) for i, o in enumerate(call.outputs)]
    lost = any(s.numel() == 0 and math.prod(o.shape) for s, o in zip(shards, call.operands, strict=True))
    lost |= any(o is not None and 0 in s and math.prod(o.shape) for s, o in zip(shapes, call.outputs, strict=True))
    if lost:
        return tuple(_identity(o, s, lay) for o, s, lay in zip(call.outputs, shapes, spec.outputs, strict=True))
    results = as_outputs(local_form(call)(ctx))
    for result, shape in zip(results, shapes, strict=True):
        assert shape is None or tuple(result.shape) == shape, f"local shape {tuple(result.shape)}, expected {shape}"
    return results


def _identity(meta: Any, shape: Any, layout: Layout) -> Any:
    if meta is None:
        return None
    ops = {p.reduce_op for p in layout if isinstance(p, Partial)}
    assert 0 in shape or ops, "an output that is neither empty nor pending needs the operator to run"
    return torch.full(shape, identity(ops.pop(), meta.dtype) if ops else 0, dtype=meta.dtype)


def identity(op: str, dtype: torch.dtype) -> Any:
    """The identity element of a reduction."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _distribute(t: torch.Tensor, layout: Layout, mesh: tuple[int, ...]) -> dict[tuple[int, ...], torch.Tensor]:
    """The shard of each rank. A pending reduction is split into different parts on the ranks of its axis."""
    parts: dict[tuple[int, ...], torch.Tensor] = {(): t}
    for axis, placement in enumerate(layout):
        n = mesh[axis]
        split = {c: spread(p, placement.reduce_op, n) if isinstance(placement, Partial) else [p] * n for c, p in parts.items()}
        parts = {(*c, i): pieces[i] for c, pieces in split.items() for i in range(n)}
    cut = {}
    for c, p in parts.items():
        for d, (o, s) in enumerate(zip(local_offset(t.shape, layout, mesh, c), local_shape(t.shape, layout, mesh, c), strict=True)):
            p = p.narrow(d, o, s)
        cut[c] = scattered(p)
    return cut


def scattered(t: torch.Tensor) -> torch.Tensor:
    """The same values with other strides and gaps, because a shard may be a view or a transpose."""
    room = t.new_zeros((*reversed(t.shape), 2))[..., 0]
    return room.permute(*reversed(range(t.ndim))).copy_(t) if t.ndim else t.clone()


def spread(t: torch.Tensor, op: str, n: int) -> list[torch.Tensor]:
    """``n`` tensors whose reduction is ``t``; the parts of each element are in random order."""
    generator = torch.Generator().manual_seed(7)
    parts = torch.stack((_real_parts if t.dtype.is_floating_point or t.dtype.is_complex else _whole_parts)(t, op, n, generator))
    order = torch.rand(parts.shape, generator=generator).argsort(0)
    return list(parts.gather(0, order).unbind(0))


def _real_parts(t: torch.Tensor, op: str, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Parts of real numbers. Some parts of a maximum or minimum are infinite, as those of empty shards are."""
    noise = [(torch.rand(t.shape, generator=generator, dtype=torch.float64) + 0.5).to(t.dtype) for _ in range(n - 1)]
    if op == "sum":
        return [*noise, t - sum(noise)]
    if op == "avg":
        return [*noise, t * n - sum(noise)]
    if op == "product":
        return [*noise, t / math.prod(noise)]
    noise = [x.where(x < 1.25, math.inf) for x in noise]
    return [t, *(t - x if op == "max" else t + x for x in noise)]


def _whole_parts(t: torch.Tensor, op: str, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Parts of integers, over the whole range of the dtype. Sums and products wrap around; odd numbers have an inverse then."""
    assert op in ("max", "min") or (op in ("sum", "product") and t.dtype != torch.bool), f"{t.dtype} has no {op}"
    noise = [torch.randint(-(2**63), 2**63 - 1, t.shape, generator=generator).to(t.dtype) for _ in range(n - 1)]
    if t.dtype == torch.bool:
        noise = [torch.randint(2, t.shape, generator=generator).bool() for _ in noise]
    if op == "sum":
        return [*noise, t - sum(noise)]
    if op == "product":
        odd = [x | 1 for x in noise]
        return [*odd, t * math.prod(map(_inverse, odd))]
    return [t, *((torch.minimum if op == "max" else torch.maximum)(t, x) for x in noise)]


def _inverse(odd: torch.Tensor) -> torch.Tensor:
    """The inverse of ``odd`` modulo 2**64, by Newton's method: ``odd`` itself has three right bits, and each step doubles them."""
    return functools.reduce(lambda x, _: x * (2 - odd * x), range(5), odd)


def assemble(parts: dict[tuple[int, ...], torch.Tensor], shape: Sequence[int], layout: Layout, mesh: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor from its shards. Replicas must agree."""
    for axis in reversed(range(len(mesh))):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for c, p in parts.items():
            groups.setdefault(c[:axis], []).append(p)
        parts = {c: _merge(pieces, layout[axis]) for c, pieces in groups.items()}
    assert tuple(parts[()].shape) == tuple(shape)
    return parts[()]


def _merge(pieces: list[torch.Tensor], placement: Any) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(pieces, placement.dim)
    if isinstance(placement, Partial):
        op = placement.reduce_op
        if op in ("max", "min"):
            stacked = torch.stack(pieces)
            return stacked.amax(0) if op == "max" else stacked.amin(0)
        return _MERGE[op](pieces)
    for piece in pieces[1:]:
        assert_near(piece, pieces[0], 0)
    return pieces[0]


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    """``torch.testing.assert_close``, which takes 30 times as long as the quick comparisons that precede it."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor) and found.dtype == expected.dtype in QUICK:
        same = found.shape == expected.shape and found.layout == expected.layout == torch.strided
        if same and (torch.equal(found, expected) or torch.allclose(found, expected, tolerance, tolerance, equal_nan=True)):
            return
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_mesh(op: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None, mesh: tuple[int, ...] = (2, 2)) -> list[OpSpec]:
    """Runs every spec of ``op`` on ``mesh`` and compares with the unsharded operator. Returns the specs."""
    whole = as_outputs(find(op)(*args, **(kwargs or {})))
    call, tensors = call_for(op, args, kwargs or {}, whole)
    ranks = Mesh({f"a{i}": n for i, n in enumerate(mesh)})
    strategy = op_strategy(call, ranks)
    assert not strategy.fallback, f"{op} has no rule"
    close = 1e-5 if torch.float32 in {t.dtype for t in (*tensors, *whole) if t is not None} else 1e-9
    for spec in strategy.specs:
        if spec.is_on_experts:  # its rows have travelled: it runs in whole programs only
            continue
        if own_collectives(call, spec, ranks):
            assert op in COMMUNICATING, f"{op} communicates by itself: test it in whole programs and name it here"
            continue
        try:
            results = run_spec(call, tensors, spec, mesh)
            for result, expected in zip(results, whole, strict=True):
                assert_near(result, expected, close)
        except Exception as error:
            raise AssertionError(f"{op} on mesh {mesh}, {spec}: {type(error).__name__}: {error}") from error
    return list(strategy.specs)


def check(op: str, *args: Any, **kwargs: Any) -> set[str]:
    """Checks every option of one axis on 2, 3 and 4 ranks. Returns all specs as text."""
    return {str(s) for n in RANKS for s in check_mesh(op, args, kwargs, (n,))}
