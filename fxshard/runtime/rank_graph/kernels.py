"""Translates a local graph to the operators of a device: fxshard's device-neutral operators become kernels (``ops/kernels.py``), and
factories create tensors on the device, to which parameters on the host are copied."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.operators import schema_of
from fxshard._torch_compat.sizes.symbols import symbolic_kernels
from fxshard.ops.kernels import FUSED, KERNELS, Kernel, Shared

FROM_HOST = torch.ops.fxshard.from_host.default


class _KernelInterpreter(fx.Interpreter):
    """Runs a local graph for tracing, with kernels in place of device-neutral operators."""

    def __init__(self, module: fx.GraphModule, device: torch.device, fused: bool) -> None:
        super().__init__(module)
        self.device = device
        shared: Shared = {}
        own: dict[Any, Kernel] = {target: partial(kernel, shared) for target, kernel in FUSED.items()}
        self.kernels = {**KERNELS, **own} if fused else KERNELS

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self.kernels:
            return self.kernels[target](*args, **kwargs)
        return super().call_function(target, args, with_device(target, kwargs, self.device))


def with_device(target: Any, kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """``kwargs`` with ``device`` if the call names a device, creates a tensor from none, or copies one from the host; else unchanged."""
    schema = schema_of(target)
    arguments = () if schema is None else schema.arguments
    if not any(a.name == "device" for a in arguments):
        return dict(kwargs)
    takes_tensor = target is not FROM_HOST and any("Tensor" in str(a.type) for a in arguments)
    if kwargs.get("device") is None and takes_tensor:
        return dict(kwargs)
    return {**kwargs, "device": device}


def device_graph(
    module: fx.GraphModule,
    device: torch.device,
    decompositions: Mapping[Any, Kernel] | None = None,
    on_host: frozenset[int] = frozenset(),
    fused: bool = False,
) -> fx.GraphModule:
    """``module`` traced on fake tensors of ``device``, with ``decompositions``; inputs in ``on_host`` are on the CPU.

    ``fused``: whether operators become the kernels that Inductor makes for CUDA. Inputs that are sizes keep their symbols.
    """
    values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    env = next((v.node.shape_env for v in values if isinstance(v, torch.SymInt)), None)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env or ShapeEnv())
    with mode:
        inputs = [
            torch.empty(v.shape, dtype=v.dtype, device="cpu" if i in on_host else device) if isinstance(v, torch.Tensor) else v
            for i, v in enumerate(values)
        ]
    interpreter = _KernelInterpreter(module, device, fused)
    with mode, torch.no_grad(), preserve_node_meta(), symbolic_kernels() if env else contextlib.nullcontext():
        traced = make_fx(lambda *args: interpreter.run(*args), decomposition_table=dict(decompositions or {}))(*inputs)
    return traced
