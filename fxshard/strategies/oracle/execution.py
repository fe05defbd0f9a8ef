"""Runs an operator on the shards of all ranks of one simulated axis, either unchanged or in its rule's local form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import pytree
from fxshard.graph.call import Call, Operand
from fxshard.layout.layouts import Layout, chunk_lengths, is_emptied, local_offset, local_shape, packed_chunks
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies.engine.conversion import identity
from fxshard.strategies.engine.registry import local_form
from fxshard.strategies.oracle.pieces import cut, non_contiguous
from fxshard.strategies.oracle.samples import Sample, filled, operator, run

Pieces = list[list[torch.Tensor | None]]
"""Per output, per rank; None for a rank on which some operand's shard is empty, so that nothing runs."""


def run_on_shards(sample: Sample, tensors: Sequence[torch.Tensor], placements: Sequence[Placement], ranks: int, seed: int) -> Pieces:
    """The unchanged operator on each rank's shards; the operator resizes its ``out=`` tensors. Raises whatever the operator raises."""
    held = _held(tensors, placements, ranks, seed)
    results = [None if _is_emptied(tensors, shards) else run(sample.op, *filled(sample, _unsized(sample, shards))) for shards in held]
    count = max(len(r) for r in results if r is not None) if any(r is not None for r in results) else 0
    return [[None if r is None else r[o] for r in results] for o in range(count)]


def _unsized(sample: Sample, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empties ``out=`` tensors, so that the operator resizes them to its result."""
    return [s.new_empty(0) if i in sample.outs else s for i, s in enumerate(shards)]


def run_by_rule(sample: Sample, call: Call, tensors: Sequence[torch.Tensor], spec: OpSpec, ranks: int, seed: int) -> Pieces:
    """The rule's local form on each rank's shards; a rank with empty shards gives the identity element of the reduction.

    With an odd seed the shards are not contiguous, as a slice of a larger tensor is not.
    """
    held = _held(tensors, [layout[0] for layout in spec.inputs], ranks, seed)
    if seed % 2:
        held = [[non_contiguous(shard) for shard in shards] for shards in held]
    results = [_rank(sample, call, tensors, shards, spec, ranks, r) for r, shards in enumerate(held)]
    return [[r[o] for r in results] for o in range(len(call.outputs))]


def _held(tensors: Sequence[torch.Tensor], placements: Sequence[Placement], ranks: int, seed: int) -> list[list[torch.Tensor]]:
    cuts = [cut(t, p, ranks, seed + 1000 * i) for i, (t, p) in enumerate(zip(tensors, placements, strict=True))]
    return [[c[r] for c in cuts] for r in range(ranks)]


def _is_emptied(tensors: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> bool:
    """Whether sharding left a dim of some operand without elements."""
    return any(is_emptied(s.shape, t.shape) for s, t in zip(shards, tensors, strict=True))


def leaves_empty(tensors: Sequence[torch.Tensor], placements: Sequence[Placement], ranks: int) -> bool:
    """Whether some rank gets an empty shard of some operand."""
    cuts = [t.shape[p.dim] for t, p in zip(tensors, placements, strict=True) if isinstance(p, Shard)]
    return any(size and 0 in chunk_lengths(size, ranks) for size in cuts)


def _rank(sample: Sample, call: Call, tensors: Any, shards: list[torch.Tensor], spec: OpSpec, ranks: int, rank: int) -> tuple[Any, ...]:
    context = EagerContext(sample, call, shards, spec, ranks, rank)
    shapes = [None if o is None else context.output_shape(i) for i, o in enumerate(call.outputs)]
    metas = [(o, s) for o, s in zip(call.outputs, shapes, strict=True) if o is not None and s is not None]
    lost = bool(metas) and all(is_emptied(s, o.shape) for o, s in metas)
    if lost or _is_emptied(tensors, shards):
        return tuple(_neutral(o, s, lay) for o, s, lay in zip(call.outputs, shapes, spec.outputs, strict=True))
    with torch.no_grad():
        result = local_form(call)(context)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _neutral(meta: Any, shape: Any, layout: Layout) -> torch.Tensor | None:
    if meta is None:
        return None
    op = next((p.reduce_op for p in layout if isinstance(p, Partial)), "sum")
    return torch.full(shape, identity(op, meta.dtype), dtype=meta.dtype)


class EagerContext:
    """A ``LocalContext`` that runs emitted operators immediately."""

    def __init__(self, sample: Sample, call: Call, shards: list[torch.Tensor], spec: OpSpec, ranks: int, rank: int) -> None:
        self.call, self.inputs, self.outputs = call, spec.inputs, spec.outputs
        self.mesh, self.coordinate = Mesh({"a": ranks}), (rank,)
        self.target = operator(call.op)
        # ``call`` holds lists as tuples; the local form gets lists again, as from a graph.
        self.args, self.kwargs = pytree.tree_map(lambda a: shards[a.index] if isinstance(a, Operand) else a, sample.marked)

    def input_shape(self, operand: int) -> tuple[int, ...]:
        return local_shape(self.call.operands[operand].shape, self.inputs[operand], self.mesh.shape, self.coordinate)

    def output_shape(self, output: int = 0) -> tuple[int, ...]:
        return local_shape(self._output(output), self.outputs[output], self.mesh.shape, self.coordinate)

    def input_offset(self, operand: int, dim: int) -> Any:
        return self._offset(self.call.operands[operand].shape, self.inputs[operand], dim)

    def output_offset(self, output: int, dim: int) -> Any:
        return self._offset(self._output(output), self.outputs[output], dim)

    def part_lengths(self, layout: Layout, dim: int) -> tuple[int, ...]:
        packed = layout.packed_on(dim)
        return (
            ()
            if packed is None
            else tuple(n for _, n in packed_chunks(packed[1].parts, self.mesh.shape[packed[0]], self.coordinate[packed[0]]))
        )

    def _output(self, output: int) -> tuple[int, ...]:
        meta = self.call.outputs[output]
        assert meta is not None
        return meta.shape

    def _offset(self, shape: tuple[int, ...], layout: Layout, dim: int) -> Any:
        """A tensor if ranks may differ, as at run time; else 0."""
        if not layout.axes_on(dim):
            return 0
        return torch.tensor(local_offset(shape, layout, self.mesh.shape, self.coordinate)[dim])

    def axis_index(self, axis: int) -> Any:
        return torch.tensor(self.coordinate[axis])

    def shift(self, x: Any, axis: int) -> Any:
        raise NotImplementedError("the ranks of the oracle do not communicate")

    def zigzag(self, x: Any, back: bool, axis: int) -> Any:
        raise NotImplementedError("the ranks of the oracle do not communicate")

    def collective(self, target: Any, *args: Any, axis: int) -> Any:
        raise NotImplementedError("the ranks of the oracle do not communicate")

    def arrived(self, started: Any) -> Any:
        raise NotImplementedError("the ranks of the oracle do not communicate")

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def item(self, node: Any, index: int) -> Any:
        return node[index]
