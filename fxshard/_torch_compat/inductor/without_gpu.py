"""Private names of torch (2.13): Inductor for a CUDA device on a machine that has none, up to the source of its Triton kernels.

What would replace it: a target of ``torch.compile`` or AOTInductor that names an absent GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fxshard.errors import OptionError, RunError, closest

_A100 = {"name": "NVIDIA A100-SXM4-80GB", "multi_processor_count": 108, "shared_memory_per_block_optin": 166912, "total_memory": 80 << 30}
_H100 = {"name": "NVIDIA H100 80GB HBM3", "multi_processor_count": 132, "shared_memory_per_block_optin": 232448, "total_memory": 80 << 30}
_B200 = {"name": "NVIDIA B200", "multi_processor_count": 148, "shared_memory_per_block_optin": 232448, "total_memory": 180 << 30}
_COMMON = {
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "gcnArchName": "",
}
TARGETS = {"sm_80": _A100, "sm_90": _H100, "sm_100": _B200}
"""Compute capability -> what torch's device properties say of the GPU that stands for it (NVIDIA's CUDA C++ Programming Guide, table of
technical specifications by compute capability; multiprocessors and memory from the data sheets of these GPUs)."""

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct AbsentGpu final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
};
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new AbsentGpu());
}
"""
"""torch's Python methods on tensors (indexing, ``contiguous``) switch to the tensor's device, on fake tensors too; a build without CUDA
has no such switch, and fails."""


def check_target(target: str) -> None:
    """Raises OptionError for an unknown target, or if Triton or a C++ compiler is missing."""
    if target not in TARGETS:
        raise OptionError(f"unknown target {target!r}{closest(target, TARGETS)}", remedy=f"use one of {', '.join(TARGETS)}")
    try:
        import triton  # type: ignore[import-not-found]  # noqa: F401  (Triton is no requirement)
    except ImportError:
        remedy = "pip install --no-deps triton==3.9.0 (about 1 GB; it contains NVIDIA's assembler, and needs no GPU)"
        raise OptionError("compiling for a GPU needs Triton, which this build of torch does not bring", remedy=remedy) from None


def _nothing_to_run(_: str) -> Callable[[Any], Any]:
    def refuse(_: Any) -> None:
        what = "this program was compiled for a GPU that this machine does not have"
        raise RunError(what, remedy="run it on a machine with that GPU")

    return refuse


@contextlib.contextmanager
def without_gpu(target: str, runner: Callable[[str], Callable[[Any], Any]] = _nothing_to_run) -> Iterator[list[str]]:
    """Within it, Inductor compiles graphs on fake CUDA tensors for ``target``; yields a list to which each graph's wrapper is added.

    ``runner`` makes the compiled graph's callable from its wrapper; by default it computes nothing. Nothing is launched or loaded. The
    process must not use CUDA otherwise.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers

    check_target(target)
    _register_guard()
    sources: list[str] = []

    def take_source(graph: Any) -> SimpleNamespace:
        code, _ = graph.codegen()
        sources.append(code.value)
        return SimpleNamespace(call=runner(code.value), __file__="", runner=None)

    with contextlib.ExitStack() as stack:
        _stand_in_for_driver(stack, target)
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda *_: None))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", take_source))
        stack.enter_context(config.patch(force_disable_caches=True, use_static_cuda_launcher=False))
        yield sources


def _stand_in_for_driver(stack: contextlib.ExitStack, target: str) -> None:
    """What torch.cuda, Dynamo's device interface and Triton's driver answer to questions about the device."""
    from torch._dynamo import device_interface
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]  # Triton is no requirement
    from triton.runtime import driver  # type: ignore[import-not-found]  # likewise

    number = int(target.removeprefix("sm_"))
    capability = divmod(number, 10)
    properties = SimpleNamespace(**_COMMON, **TARGETS[target], major=capability[0], minor=capability[1])
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "get_device_capability": capability,
        "get_rng_state": torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": None,
        "set_device": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, _always(answer), create=True))
    for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_getCurrentRawStream"):
        stack.enter_context(mock.patch.object(torch._C, name, _always(0), create=True))
    device = _device_interface(device_interface.CudaInterface, properties, number)
    known = {**device_interface.device_interfaces, "cuda": device, "cuda:0": device}
    stack.enter_context(mock.patch.dict(device_interface.device_interfaces, known))
    absent = SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", number, 32)),
        get_current_device=_always(0),
        get_active_torch_device=_always(torch.device("cuda", 0)),
        get_device_interface=_always(torch.cuda),
        is_active=_always(True),
    )
    stack.enter_context(mock.patch.object(driver, "_active", absent))
    caches = [known for known in vars(_triton).values() if hasattr(known, "cache_clear")]
    for cached in caches:  # what torch found before, without a device
        cached.cache_clear()
        stack.callback(cached.cache_clear)


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer


def _device_interface(cuda: Any, properties: SimpleNamespace, capability: int) -> type:
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_compute_capability": capability,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "synchronize": None,
        "set_device": None,
        "get_raw_stream": 0,
    }
    fields: dict[str, Any] = {name: staticmethod(_always(answer)) for name, answer in answers.items()}
    worker = {name: fields[name] for name in ("get_device_properties", "current_device")}
    return type("AbsentCuda", (cuda,), {**fields, "Worker": type("Worker", (cuda.Worker,), worker)})


@functools.cache
def _register_guard() -> None:
    """Registers a switch of devices that does nothing, compiled once; not in a build that has CUDA's own."""
    if torch.version.cuda is not None:
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    library = Path(cache_dir(), f"fxshard_absent_gpu_{torch.__version__}.so")
    if not library.exists():
        _build(library)
    ctypes.CDLL(str(library))


def _build(library: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}.so")
    flags = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command = [get_cpp_compiler(), "-x", "c++", "-", "-std=c++20", "-shared", "-fPIC", *flags, "-lc10", "-o", str(partial)]
    made = subprocess.run(command, input=GUARD, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RunError(f"the C++ compiler failed: {made.stderr.strip()[-400:]}", remedy="install a C++20 compiler (g++ 11 or later)")
    partial.replace(library)
