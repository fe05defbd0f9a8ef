"""One row per family: the operators of its joint graph that fxshard only replicates, and those for which DTensor has no rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bench.families.family import Family
from fxshard._torch_compat.dtensor.rules import dtensor_has_rule
from fxshard.errors import TraceError
from fxshard.graph.call import Call
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.trace.trace import trace
from fxshard.strategies import lookup

MESHES = (Mesh({"a": 2}), Mesh({"a": 2, "b": 2}))
BATCH_NORM = ("channel_sum", "channel_spread", "batch_statistics", "running_statistics", "normalise")
NORM_SUMS = ("row_norm_sums", "row_norm_weight", "row_norm_backward")
ROW_NORM = ("row_sum", "row_mean", "row_spread", "row_rstd", "row_normalise")
COUNTERPARTS = {
    "fxshard.sdpa.default": "aten._scaled_dot_product_flash_attention.default",
    "fxshard.sdpa_backward.default": "aten._scaled_dot_product_flash_attention_backward.default",
    "fxshard.einsum.default": "aten.bmm.default",
    "fxshard.dropout.default": "aten.native_dropout.default",
    "fxshard.dropout_backward.default": "aten.native_dropout_backward.default",
    "fxshard.random.default": "aten.uniform.default",
    **dict.fromkeys(("fxshard.softmax.default", "fxshard.sum_exp.default"), "aten._softmax.default"),
    **dict.fromkeys(("fxshard.softmax_backward.default", "fxshard.sum_product.default"), "aten._softmax_backward_data.default"),
    **dict.fromkeys((f"fxshard.{op}.default" for op in ("cross_entropy", "target_score", "score_sum")), "aten.nll_loss_forward.default"),
    **dict.fromkeys((f"fxshard.{op}.default" for op in ("cross_entropy_backward", "spread_target")), "aten.nll_loss_backward.default"),
    **dict.fromkeys(("fxshard.expert_linear.default", "fxshard.expert_outer.default"), "aten._grouped_mm.default"),
    **dict.fromkeys(("fxshard.to_experts.default", "fxshard.from_experts.default"), "aten.index.Tensor"),
    **dict.fromkeys((f"fxshard.{op}.default" for op in BATCH_NORM), "aten.native_batch_norm.default"),
    **dict.fromkeys((f"fxshard.{op}.default" for op in ROW_NORM), "aten.native_layer_norm.default"),
    **dict.fromkeys((f"fxshard.{op}.default" for op in NORM_SUMS), "aten.native_layer_norm_backward.default"),
    **dict.fromkeys(("fxshard.batch_norm_sums.default", "fxshard.batch_norm_backward.default"), "aten.native_batch_norm_backward.default"),
}
"""The aten operators that DTensor would get instead of fxshard's own operators, on the device on which it supports most."""


@dataclass(frozen=True)
class Row:
    """The results of one family; ``reason``: why it has no joint graph, in which case the rest is empty.

    ``fallbacks``: operators without a rule; ``whole``: operator -> note of its rule, if the rule only replicates a call that has something
    to shard; ``dtensor``: operators with a tensor operand for which DTensor has no rule, strategy or decomposition.
    """

    family: str
    kind: str
    nodes: int = 0
    operators: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    dtensor: tuple[str, ...] = ()
    reason: str = ""


def row(family: Family) -> Row:
    """Traces, annotates and counts one family."""
    torch.manual_seed(0)
    model, args, kwargs = family.build(True)
    try:
        graph = trace(model, args, kwargs)
    except TraceError as error:
        return Row(family.name, family.kind, reason=str(error))
    annotated = [annotate(graph, mesh) for mesh in MESHES]
    calls = annotated[0].calls
    return Row(
        family.name,
        family.kind,
        nodes=len(list(graph.nodes)),
        operators=tuple(sorted({c.op for c in calls.values()})),
        fallbacks=tuple(sorted({calls[node].op for a in annotated for node, _ in a.fallbacks})),
        whole=kept_whole(annotated),
        dtensor=tuple(sorted({c.op for c in calls.values() if not _known_to_dtensor(c)})),
    )


def kept_whole(annotated: list[Annotated]) -> dict[str, str]:
    """Operators with a call that has something to shard but only one option on every mesh, with the notes of their rules."""
    calls = annotated[0].calls
    single = [n for n, c in calls.items() if _has_something(c) and all(len(a.specs[n]) == 1 for a in annotated)]
    entries = {calls[n].op: (lookup(calls[n].op), calls[n]) for n in reversed(single)}
    return {op: entry.rule(call).note for op, (entry, call) in sorted(entries.items()) if entry}


def _has_something(call: Call) -> bool:
    """Whether a result, or an operand whose values are read, has more than one element."""
    read = () if call.op.startswith("aten.new_") else call.operands
    return any(math.prod(m.shape) > 1 for m in (*read, *call.outputs) if m is not None)


def _known_to_dtensor(call: Call) -> bool:
    """DTensor never sees an operator without tensor operands, so that counts as known. fxshard's own operators are looked up by their aten
    counterparts."""
    if not call.operands:
        return True
    name = COUNTERPARTS[call.op] if call.op.startswith("fxshard.") else call.op
    return dtensor_has_rule(functools.reduce(getattr, name.split("."), torch.ops))
