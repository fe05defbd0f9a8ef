"""``loss_parallel()`` of torch around a compiled function: the logits of a cross entropy stay sharded by class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx
from torch.distributed.tensor import DTensor, Replicate, Shard

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.dtensor.captured import captured_mesh, loss_parallel_is_on
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh


def keep_classes_sharded(graph: fx.Graph) -> None:
    """Within ``loss_parallel()``: keeps the layout of logits whose classes are sharded, in a graph with Dynamo's example values."""
    if not loss_parallel_is_on():
        return
    for node in graph.find_nodes(op="call_function", target=F.cross_entropy):
        logits = node.args[0] if node.args else node.kwargs["input"]
        value = logits.meta.get("example_value")
        if not isinstance(value, DTensor) or any(type(p) not in (Shard, Replicate) for p in value.placements):
            continue
        if any(p.is_shard(min(1, value.dim() - 1)) for p in value.placements):
            with graph.inserting_before(node):
                described = str(Layout(value.placements)), str(as_mesh(captured_mesh(value)))
                placed = graph.call_function(torch.ops.fxshard.placed.default, (logits, *described, False, True))
            placed.meta = {key: value for key, value in node.meta.items() if key in ("stack_trace", "nn_module_stack")}
            node.replace_input_with(logits, placed)
