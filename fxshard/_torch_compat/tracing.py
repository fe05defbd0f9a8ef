"""Private names of torch (2.13): the state besides the graph on which AOTAutograd's result depends, and its descriptors as plain data.

What would replace it: a cache of joint graphs in torch itself, or a list of the settings that decide them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import lru_cache
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._functorch._aot_autograd import descriptors
from torch._native import registry
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxshard._torch_compat.inductor.code_cache import torch_sources

TORCH_OWN_KERNELS = frozenset(
    ("aten/linalg_lu_solve.out/MPS", "aten/to_dense/PythonTLSSnapshot", "aten/to_dense/FuncTorchDynamicLayerFrontMode")
)
"""Kernels that torch registers for its operators from Python, besides those for the meta device and those in its own registry."""
SDP = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
DEVICES = ("cpu", "cuda")


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Within it hooks on saved tensors see nothing, as those of ``torch.utils.checkpoint``, which counts what autograd saves."""
    if not _has_saved_tensor_hooks():  # torch.func refuses hooks of any kind
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _has_saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def tracing_state() -> list[Any] | None:
    """Settings, sources and state of torch that AOTAutograd and the operators it calls depend on, as plain values.

    None if something without a text form is active: a mode, hooks on saved tensors, kernels that a library registered for aten operators.
    """
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    if modes or _has_saved_tensor_hooks() or _has_user_kernels():
        return None
    settings = repr(sorted(functorch.save_config_portable(ignore_private_configs=False, readonly_values=True).items()))
    if " at 0x" in settings:
        return None
    backends = torch.backends
    state = (
        [(torch.is_autocast_enabled(one), str(torch.get_autocast_dtype(one))) for one in DEVICES],
        (torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (str(torch.get_default_dtype()), str(torch.get_default_device()), torch.are_deterministic_algorithms_enabled()),
        [getattr(backends.cuda, one)() for one in SDP],
        (backends.mha.get_fastpath_enabled(), backends.mkldnn.enabled, backends.cudnn.enabled),
    )
    return [settings, repr(state), *torch_sources()]


def own_kernels() -> frozenset[str]:
    """The kernels for aten operators that torch registered by itself, as ``torch.library`` names them: ``"aten/bmm/CUDA"``."""
    libraries = registry._override_libs if hasattr(registry, "_override_libs") else registry._aten_override_libs  # since 2.15
    return TORCH_OWN_KERNELS.union("/".join(("aten", *place[-2:])) for place in libraries)


def _has_user_kernels() -> bool:
    """Whether a library registered its own kernels for aten operators."""
    known = own_kernels()
    return any(one.startswith("aten/") and not one.endswith("/Meta") and one not in known for one in torch.library._impls)


@lru_cache(maxsize=1)
def _descriptor_types() -> dict[str, type]:
    found = {name: one for name, one in vars(descriptors).items() if isinstance(one, type) and dataclasses.is_dataclass(one)}
    return {name: one for name, one in found.items() if issubclass(one, (descriptors.AOTInput, descriptors.AOTOutput))}


def descriptor_to_json(end: Any) -> dict[str, Any] | None:
    """AOTAutograd's description of an input or output as plain data; None for any other object."""
    if not dataclasses.is_dataclass(end) or _descriptor_types().get(type(end).__name__) is not type(end):
        return None
    return {"end": type(end).__name__, **{one.name: _part(getattr(end, one.name)) for one in dataclasses.fields(end)}}


def _part(value: Any) -> Any:
    return value if isinstance(value, (str, int)) else descriptor_to_json(value)


def descriptor_from_json(data: dict[str, Any]) -> Any:
    """The inverse of ``descriptor_to_json``; raises KeyError or TypeError for other data."""
    fields = {name: descriptor_from_json(one) if isinstance(one, dict) else one for name, one in data.items() if name != "end"}
    return _descriptor_types()[data["end"]](**fields)
