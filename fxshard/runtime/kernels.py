"""The local graph in the device's own operators: neutral nodes become kernels, factories make tensors where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from fxshard._torch_compat import FakeTensorMode, schema_of
from fxshard.ops import attention, contraction, cross_entropy, normalization, random, row_norm, softmax

Kernel = Callable[..., Any]

KERNELS: dict[Any, Kernel] = {
    torch.ops.aten.masked_select.default: lambda x, mask: torch.ops.aten.masked_select(*torch.broadcast_tensors(x, mask)),
    torch.ops.fxshard.einsum.default: contraction.kernel,
    torch.ops.fxshard.sdpa.default: lambda *args: tuple(t.contiguous() for t in attention.forward_kernel(*args)),
    torch.ops.fxshard.sdpa_backward.default: lambda *args: tuple(t.contiguous() for t in attention.backward_kernel(*args)),
    torch.ops.fxshard.dropout_backward.default: random.scaled,
    torch.ops.fxshard.sum_exp.default: softmax.exp_sum,
    torch.ops.fxshard.softmax.default: softmax.normalised,
    torch.ops.fxshard.sum_product.default: softmax.product_sum,
    torch.ops.fxshard.softmax_backward.default: softmax.gradient,
    torch.ops.fxshard.target_score.default: cross_entropy.scores,
    torch.ops.fxshard.score_sum.default: cross_entropy.class_sum,
    torch.ops.fxshard.cross_entropy.default: cross_entropy.losses,
    torch.ops.fxshard.cross_entropy_backward.default: cross_entropy.gradients,
    torch.ops.fxshard.spread_target.default: cross_entropy.at_target,
    torch.ops.fxshard.channel_sum.default: normalization.sum_kernel,
    torch.ops.fxshard.channel_spread.default: normalization.spread_kernel,
    torch.ops.fxshard.batch_statistics.default: normalization.statistics_kernel,
    torch.ops.fxshard.running_statistics.default: normalization.running_kernel,
    torch.ops.fxshard.normalise.default: normalization.normalise_kernel,
    torch.ops.fxshard.batch_norm_sums.default: normalization.backward_sums_kernel,
    torch.ops.fxshard.batch_norm_backward.default: normalization.backward_kernel,
    torch.ops.fxshard.row_sum.default: row_norm.sum_kernel,
    torch.ops.fxshard.row_mean.default: row_norm.mean_kernel,
    torch.ops.fxshard.row_spread.default: row_norm.spread_kernel,
    torch.ops.fxshard.row_rstd.default: row_norm.rstd_kernel,
    torch.ops.fxshard.row_normalise.default: row_norm.normalise_kernel,
    torch.ops.fxshard.row_norm_sums.default: row_norm.backward_sums_kernel,
    torch.ops.fxshard.row_norm_backward.default: row_norm.backward_kernel,
    torch.ops.fxshard.row_norm_weight.default: row_norm.weight_kernel,
}


class _ToKernels(fx.Interpreter):
    """Runs a local graph under tracing, each neutral node by its kernel."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.device = device

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in KERNELS:
            return KERNELS[target](*args, **kwargs)
        return super().call_function(target, args, placed(target, kwargs, self.device))


def placed(target: Any, kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """``kwargs`` of an operator that names a device, or makes a tensor from none, with ``device`` in its place."""
    schema = schema_of(target)
    arguments = () if schema is None else schema.arguments
    if not any(a.name == "device" for a in arguments):
        return dict(kwargs)
    takes_tensor = any("Tensor" in str(a.type) for a in arguments)
    if kwargs.get("device") is None and takes_tensor:
        return dict(kwargs)
    return {**kwargs, "device": device}


def device_graph(
    module: fx.GraphModule, device: torch.device, decompositions: Mapping[Any, Kernel] | None = None, on_host: frozenset[int] = frozenset()
) -> fx.GraphModule:
    """``module`` traced anew on fake tensors of ``device``, under ``decompositions``; inputs in ``on_host`` lie on the CPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    with mode:
        inputs = [
            torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="cpu" if i in on_host else device)
            for i, n in enumerate(placeholders)
        ]
    interpreter = _ToKernels(module, device)
    with mode, torch.no_grad(), preserve_node_meta():
        traced = make_fx(lambda *args: interpreter.run(*args), decomposition_table=dict(decompositions or {}))(*inputs)
    return traced
