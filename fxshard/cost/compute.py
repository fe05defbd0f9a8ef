"""Time of operators by roofline: the greater of FLOP over the device's rate and bytes over its memory bandwidth (Williams et al., 2009).

All sizes are ceil sizes: the rank with the most work sets the pace. FLOP rates depend on the element size (a size without a
rate uses that of the next larger size, else of four bytes; integers always use the latter). Measured curves of matrix products and
copies replace the rates. Kernel launches are not included: all plans of a graph run the same operators, so launches add the
same to each. (Collectives, whose number differs between plans, do include a launch.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxshard.cost.kernels import KERNEL, LINEAR, OUTER, product_dtype, slowdown
from fxshard.cost.mask_density import scores_seen
from fxshard.errors import OptionError
from fxshard.graph.call import Call, Operand
from fxshard.graph.planning_graph import UNKNOWN, VIEWS
from fxshard.layout.layouts import ceil_shape
from fxshard.mesh.architectures import Architecture
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import EXPERT_IMBALANCE, OpSpec

Shape = tuple[int, ...]

FUSED_READS = {
    "fxshard.sum_exp.default": (0,),
    "fxshard.softmax.default": (0,),
    "fxshard.target_score.default": (0,),
    "fxshard.score_sum.default": (0,),
    "fxshard.sum_product.default": (1,),
    "fxshard.softmax_backward.default": (0,),
    "fxshard.row_norm_weight.default": (0, 1),
}
"""Arguments whose reads are not charged: a fused kernel reads them once for several operators, or hardly reads them."""
BAGS = {"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"}
LOOKUPS = {
    "aten.embedding.default",
    "aten.gather.default",
    "aten.index.Tensor",
    "aten.index_select.default",
    "aten.take.default",
    "aten._unsafe_index.Tensor",
    *BAGS,
}
"""Operators that read elements of their first operand where their indices say, so that they read at most as many as they return; bags
return sums of the rows that they read."""
UNFUSED_FLAG = {"fxshard.row_norm_weight.default": 5}
"""Position of the argument that is True if no other operator reads these arguments: their reads are then charged."""
MASK = (9, 13)
"""The argument that is the mask's text: of ``fxshard.flex_attention``, and of its backward."""
NORM_SUMS = {
    "fxshard.channel_sum.default",
    "fxshard.channel_spread.default",
    "fxshard.batch_norm_sums.default",
    "fxshard.row_sum.default",
    "fxshard.row_spread.default",
    "fxshard.row_norm_sums.default",
}
"""The sums of a decomposed norm, charged nothing: the operator that applies them is charged as the whole norm."""


@dataclass(frozen=True)
class Work:
    """What one operator does on one rank, whatever it costs: ``flops``, those charged for a slower kernel included, in ``dtype``;
    ``moved``: bytes read and written; ``starts``: microseconds to start its kernel. ``product``: a matrix product."""

    flops: float
    moved: float
    dtype: torch.dtype
    product: bool
    starts: float

    def time(self, hardware: Hardware) -> float:
        """Microseconds."""
        return self.starts + max(_arithmetic(hardware, self.dtype, self.flops, self.product), traffic_time(hardware, self.moved))


def compute_time(call: Call, spec: OpSpec, mesh: Mesh) -> float:
    """Microseconds of one operator on one rank; 0 for free operators, the sums of norms, and unknown shapes."""
    work = work_of(call, spec, mesh.shape, mesh.hardware.reached)
    return 0.0 if work is None else work.time(mesh.hardware)


def work_of(call: Call, spec: OpSpec, mesh: Shape, reached: Architecture | None) -> Work | None:
    """The work of one operator on one rank of a mesh of this shape; None for free operators, the sums of norms, and unknown shapes."""
    if call.op in VIEWS or call.op in NORM_SUMS or any(m is not None and UNKNOWN in m.shape for m in (*call.operands, *call.outputs)):
        return None
    inputs = [ceil_shape(m.shape, layout, mesh) for m, layout in zip(call.operands, spec.inputs, strict=True)]
    outputs = [() if m is None else ceil_shape(m.shape, layout, mesh) for m, layout in zip(call.outputs, spec.outputs, strict=True)]
    tensors = list(zip((*call.operands, *call.outputs), (*inputs, *outputs), strict=True))
    alone = call.op in UNFUSED_FLAG and call.arg(UNFUSED_FLAG[call.op]) is True
    fused = () if alone else FUSED_READS.get(call.op, ())
    read = {value.index for i in fused if isinstance(value := call.arg(i), Operand)}
    share = call.traffic or tuple(float(i not in read) for i in range(len(tensors)))
    passed = [0.0 if m is None else part * math.prod(s) * m.dtype.itemsize for part, (m, s) in zip(share, tensors, strict=True)]
    if call.op in LOOKUPS:
        passed[0] = min(passed[0], _looked_up(call, inputs, outputs) * call.operands[0].dtype.itemsize)
    flops = flops_of(call, inputs, outputs)
    floats = (m.dtype for m, _ in tensors if m is not None and (m.dtype.is_floating_point or m.dtype.is_complex))
    dtype = product_dtype(call, next(floats, torch.int32), reached)
    if reached is not None:
        flops *= slowdown(call, inputs, outputs, dtype, reached)
    writes = any(part for part, m in zip(share[len(inputs) :], call.outputs, strict=True) if m is not None)
    return Work(flops, sum(passed), dtype, call.op in _FLOPS, KERNEL if reached is not None and writes else 0.0)


def flops_of(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    """FLOPs of one operator on shards of these shapes."""
    return _FLOPS.get(call.op, _looked_up if call.op in LOOKUPS else _pointwise)(call, inputs, outputs)


def _arithmetic(hardware: Hardware, dtype: torch.dtype, flops: float, product: bool) -> float:
    """Microseconds of ``flops``; a complex one counts as four real ones. ``product``: a matrix product, which may have a measured curve."""
    if dtype.is_complex:
        dtype, flops = dtype.to_real(), 4 * flops
    curve = hardware.measured.products.get(str(dtype).removeprefix("torch.")) if product else None
    if curve is not None:
        return curve(flops)
    size, rates = dtype.itemsize, hardware.flops
    rate = next((rates[s] for s in (size, 2 * size, 4 * size, 4) if s in rates), None)
    if rate is None:
        what = f"the hardware {hardware.name!r} has no FLOP rate for elements of {size} bytes, nor for larger ones, nor for those of 4"
        raise OptionError(what, remedy="give it one: Hardware(flops={4: 1e12, ...})")
    return flops / rate * 1e6


def traffic_time(hardware: Hardware, moved: float) -> float:
    """Microseconds of reading and writing ``moved`` bytes."""
    curve, reached = hardware.measured.copy, hardware.reached
    bandwidth = hardware.memory_bandwidth * (reached.memory if reached is not None else 1.0)
    return curve(moved) if curve is not None else moved / bandwidth * 1e6


Flops = Callable[[Call, list[Shape], list[Shape]], float]


def _pointwise(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    return float(max((math.prod(s) for s in (*inputs, *outputs)), default=0))


def _looked_up(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Elements that a lookup reads, if it reads none twice."""
    return float(math.prod(inputs[1]) * inputs[0][-1] if call.op in BAGS else math.prod(outputs[0]))


def _einsum(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 x the product of the sizes of all letters."""
    left, right = str(call.arg(2)).split("->")[0].split(",")
    sizes = dict(zip(left, inputs[0], strict=True))
    for letter, size in zip(right, inputs[1], strict=True):
        sizes[letter] = min(size, sizes.get(letter, size))
    return 2.0 * math.prod(sizes.values())


def _sdpa(matmuls: int, query: int) -> Flops:
    """``matmuls`` products of b h s t d: two forward, five backward (FlashAttention recomputes the scores); causal: of the scores seen.

    With sharded queries, the last shard sets the pace. All keys count: a rank with a shard of them gets the others.
    """

    def flops(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
        q, keys = inputs[query], call.operands[query + 1].shape[-2]
        causal = call.args[4 if query == 0 else 7] is True
        seen = _seen_by_last(call.operands[query].shape[-2], q[-2], keys) if causal else q[-2] * keys
        return matmuls * 2.0 * math.prod(q[:-2]) * q[-1] * seen

    return flops


def _seen_by_last(queries: int, rows: int, keys: int) -> float:
    """Scores that the last ``rows`` of ``queries`` queries see in causal attention: the integral of min(x, keys)."""

    def up_to(x: int) -> float:
        return min(x, keys) ** 2 / 2 + keys * max(0, x - keys)

    return up_to(queries) - up_to(queries - rows)


def _block_attention(matmuls: int, query: int) -> Flops:
    """The same for the local form: a block of keys whose last queries, on the last rank, see all of it; half of it if blocks are dealt
    head-to-tail, and the call says from which query on keys are seen."""

    def flops(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
        q, k = inputs[query], inputs[query + 1]
        seen = q[-2] * k[-2] - (min(q[-2], k[-2]) ** 2 / 2 if k[-2] > q[-2] else 0)
        seen *= 1.0 if call.arg(7 if query else 4) is None else 0.5
        return matmuls * 2.0 * math.prod(q[:-2]) * q[-1] * seen

    return flops


def _flex_attention(products: int, query: int) -> Flops:
    """The same with functions for mask and scores: of the scores, those that the mask's text lets the operator skip do not count."""

    def flops(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
        first = query + (1 if query and call.meta(1) is not None else 0)
        q, keys, value = inputs[first], inputs[first + 1], inputs[first + 2]
        whole, mask = call.operands[first].shape, call.arg(MASK[query])
        known = all(isinstance(size, int) for size in (*whole, keys[-2], q[-2]))
        batch, heads, queries, _ = whole
        seen = scores_seen(mask, batch, heads, queries, keys[-2], q[-2]) if known else q[-2] * keys[-2]
        return products * math.prod(q[:-2]) * seen * (q[-1] + value[-1])

    return flops


def _varlen_attention(products: int, query: int) -> Flops:
    """The same within packed sequences: each query sees at most as many keys as the longest sequence has."""

    def flops(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
        longest = call.arg(9 if query else 7)
        keys = inputs[query + 1][0]
        return products * 2.0 * math.prod(inputs[query]) * (min(longest, keys) if isinstance(longest, int) else keys)

    return flops


def _convolution(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 x output elements x weight elements of one output channel."""
    return 2.0 * math.prod(outputs[0]) * math.prod(inputs[1][1:])


def _convolution_backward(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    return 4.0 * math.prod(inputs[0]) * math.prod(inputs[2][1:])


def _grouped(matmuls: int) -> Flops:
    """2 x rows x the matrix of one group, assuming groups of equal size: a rank has the same share of the rows as of the groups."""

    def flops(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
        a, b = (meta.shape for meta in call.operands[:2])
        if len(b) == 3:
            return matmuls * 2.0 * math.prod(a[:-1]) * math.prod(inputs[1]) / b[0]
        held = inputs[0] if len(a) == 3 else outputs[0]
        return matmuls * 2.0 * b[1 if len(a) == 3 else 0] * math.prod(held) / _groups(call)

    return flops


def _experts(call: Call, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 x rows x one expert's matrix. A rank with some of the experts expects their share of the rows, ``EXPERT_IMBALANCE`` times."""
    held, whole = (inputs[1], call.operands[1].shape) if call.op == LINEAR else (outputs[0], _groups_shape(call))
    imbalance = EXPERT_IMBALANCE if held[0] < whole[0] else 1.0
    return imbalance * 2.0 * math.prod(inputs[0][:2]) * math.prod(held) / whole[0]


def _groups_shape(call: Call) -> Shape:
    out = call.outputs[0]
    assert out is not None
    return out.shape


def _groups(call: Call) -> int:
    return next(m.shape[0] for m in (*call.operands, *call.outputs) if m is not None and m.ndim == 3)


_FLOPS: dict[str, Flops] = {
    "fxshard.einsum.default": _einsum,
    "fxshard.sdpa.default": _sdpa(2, 0),
    "fxshard.sdpa_backward.default": _sdpa(5, 1),
    "fxshard.block_attention.default": _block_attention(2, 0),
    "fxshard.block_attention_backward.default": _block_attention(5, 1),
    "fxshard.flex_attention.default": _flex_attention(2, 0),
    "fxshard.flex_attention_backward.default": _flex_attention(5, 1),
    "fxshard.varlen_attention.default": _varlen_attention(2, 0),
    "fxshard.varlen_attention_backward.default": _varlen_attention(5, 1),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._grouped_mm.default": _grouped(1),
    "transformers.grouped_mm_fallback.default": _grouped(1),
    "transformers.grouped_mm_fallback_backward.default": _grouped(2),
    LINEAR: _experts,
    OUTER: _experts,
}
