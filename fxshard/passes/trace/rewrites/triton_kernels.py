"""Users' Triton kernels in a traced graph: each call becomes one ``fxshard_users::triton_kernel``, which runs on whole tensors.

A call contains the grid, sizes and strides of the whole tensors as numbers, and only its author could adapt them to a shard. It therefore
has no rule. A custom operator computes these numbers from its operands, so a kernel wrapped in one can have a rule.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard_users)
from fxshard._torch_compat.dynamo.kernels import FUNCTIONAL, MUTATION, kernel_and_constants
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line
from fxshard.ops.user_kernel import KernelCall, keep_call


def replace_kernel_calls(joint: fx.GraphModule) -> None:
    """Rewrites the calls of Triton kernels, including those inside a ``triton_op``, which torch expands during tracing.

    Raises TraceError for a grid or sizes that are known only at run time.
    """
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target in (FUNCTIONAL, MUTATION):
            _replace_call(joint.graph, node)


def _replace_call(graph: fx.Graph, node: fx.Node) -> None:
    given: dict[str, Any] = dict(node.kwargs)
    arguments = given["kwargs"]
    tensors = {name: x for name, x in arguments.items() if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)}
    plain = {name: x for name, x in arguments.items() if name not in tensors}
    if node.target is MUTATION or fx.map_arg((plain, given["grid"]), lambda n: None) != (plain, given["grid"]):
        raise TraceError(
            f"{node.name} calls a Triton kernel with sizes or a grid known only at run time",
            where=source_line(node) or node.name,
            remedy="put the call into an operator: @torch.library.custom_op with register_fake and register_autograd",
        )
    kernel, constants = kernel_and_constants(given["kernel_idx"], given["constant_args_idx"])
    call = KernelCall(
        kernel=kernel,
        grid=tuple(given["grid"]),
        descriptors=dict(given["tma_descriptor_metadata"]),
        plain={**plain, **constants},
        tensors={name: tuple(x.meta["val"].stride()) for name, x in tensors.items()},
        written=tuple(name for name in tensors if name in given["tensors_to_clone"]),
    )
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.fxshard_users.triton_kernel.default, (list(tensors.values()), keep_call(call)), name=call.name)
    made.meta = {**node.meta, "val": [node.meta["val"][name] for name in call.written]}
    for user in list(node.users):
        assert user.target is operator.getitem
        user.args = (made, call.written.index(user.args[1]))
    graph.erase_node(node)
