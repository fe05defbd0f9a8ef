"""Private names of torch (2.13): load code from Inductor's disk cache by key, without the graph, and the settings that determine it.

What would replace it: ``torch.compiler.save_cache_artifacts``, once it can be looked up by a key of the caller's.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch_compat.inductor.cpp import instructions
from fxshard._torch_compat.inductor.joined_kernels import joined_kernels
from fxshard._torch_compat.inductor.light_imports import light_imports

if TYPE_CHECKING:
    from fxshard._torch_compat.inductor.inductor import Compiled

PASSES = (
    *("pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass"),
    *("joint_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn", "cudagraph_policy"),
)
"""Settings of Inductor that can hold user code."""
TABLES = {"torch._inductor.decomposition": "decompositions", "torch._inductor.lowering": "lowerings"}
"""Tables of Inductor to which users can add their own functions."""
LIBRARIES = ("torch", "fxshard", "functools")
NO_CODE = ("include", "lib", "test", "testing", "share", "bin", "__pycache__")
"""Folders of torch without code that takes part in compilation."""


def settings_of_inductor() -> Any:
    """Everything besides the graph that determines Inductor's code, as plain values; None if it includes user code.

    As in torch's own key of a graph (``FxGraphHashDetails``), but source files are represented by their sizes and modification times, and
    the processor's instructions are part of it.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config, config_comms

    if config.force_disable_caches or not config.fx_graph_cache or config.triton.cudagraphs or functorch.bundled_autograd_cache:
        return None
    if any(getattr(config, name, None) is not None for name in PASSES) or _has_others_code():
        return None
    portable = [c.save_config_portable(ignore_private_configs=False, readonly_values=True) for c in (config, config_comms, functorch)]
    text = [repr(sorted(found.items())) for found in portable]
    if any(" at 0x" in one for one in text):
        return None
    matmul = torch.backends.cuda.matmul
    state = (
        (torch.get_num_threads(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled()),
        (torch.is_deterministic_algorithms_warn_only_enabled(), torch.utils.deterministic.fill_uninitialized_memory),
        (matmul.fp32_precision, matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        instructions(),
    )
    return [text, repr(state), sys.version, torch.__version__, list(torch_sources())]


def _has_others_code() -> bool:
    tables = (getattr(sys.modules[name], table) for name, table in TABLES.items() if name in sys.modules)
    return any(_module(function).partition(".")[0] not in LIBRARIES for table in tables for function in table.values())


def _module(function: Any) -> str:
    """The module of a function, without the wrappers that torch adds."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or "torch"


@functools.lru_cache(maxsize=1)
def torch_sources() -> tuple[str, ...]:
    """Path, size and modification time of each file of torch that takes part in compilation."""
    root = os.path.dirname(torch.__file__)
    return tuple(f"{path[len(root) :]} {size} {time}" for path, size, time in _files(root))


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name.endswith((".py", ".so")):
                facts = entry.stat()
                yield entry.path, facts.st_size, facts.st_mtime_ns
            elif entry.is_dir() and entry.name not in NO_CODE:
                yield from _files(entry.path)


def key_of(compiled: Any) -> str | None:
    """Inductor's cache key of a compiled graph; None if it is not cached."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def condition_of(compiled: Any) -> str:
    """A digest of Inductor's guards on the sizes of a compiled graph; "" for none."""
    return _digest(getattr(compiled, "guards_expr", None))


def _digest(guards: str | None) -> str:
    return hashlib.sha256(guards.encode()).hexdigest() if guards else ""


def load_compiled(key: str, condition: str = "") -> Compiled | None:
    """The compiled graph in Inductor's cache under ``key`` with guards of digest ``condition``; None if there is none."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    def is_it(guards: str, _: Any) -> bool:
        return _digest(guards) == condition

    constants = CompiledFxGraphConstants()
    graph, _, _ = FxGraphCache.find_guarded_entry(key, True, None, is_it, [])
    if graph is None:
        return None
    with joined_kernels():
        if graph.device_types <= {"cpu"}:
            _load_for_cpu(graph, constants)
        else:
            graph = _load(key, constants, is_it)
    if graph is not None:
        graph._fx_graph_cache_key = key
        graph.post_compile([], constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return graph


def _load(key: str, constants: Any, is_it: Callable[[str, Any], bool]) -> Any:
    """Load as Inductor does, Triton kernels included."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        return FxGraphCache.load_with_key(key, [], [], True, None, False, constants, is_it)[0]


def _load_for_cpu(graph: Any, constants: Any) -> None:
    """Load the C++ code only, without importing the compiler, which takes half a second."""
    from torch._dynamo.utils import counters

    with light_imports():
        graph.after_deserialization(constants)
    counters["inductor"]["fxgraph_cache_hit"] += 1
