"""Private names of torch (2.13): code that Inductor has on disk, taken by its key without the graph, and what else decides it."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch_compat.inductor.joined_kernels import joined_kernels
from fxshard._torch_compat.inductor.light_imports import light_imports

if TYPE_CHECKING:
    from fxshard._torch_compat.inductor.inductor import Compiled

PASSES = (
    *("pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass"),
    *("joint_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn", "cudagraph_policy"),
)
"""Settings of Inductor that hold code of the user's."""
TABLES = {"torch._inductor.decomposition": "decompositions", "torch._inductor.lowering": "lowerings"}
"""Where a user can put code of his own into Inductor."""
LIBRARIES = ("torch", "fxshard", "functools")
NO_CODE = ("include", "lib", "test", "testing", "share", "bin", "__pycache__")
"""Folders of torch that hold nothing that compiles."""


def settings_of_inductor() -> Any:
    """What besides a graph decides the code that Inductor makes of it, as plain values; None where some of that is code of the user's.

    What torch's own key of a graph has (``FxGraphHashDetails``), but for its sources: their sizes and times stand for what is in them.
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
    )
    return [text, repr(state), sys.version, torch.__version__, list(torch_sources())]


def _has_others_code() -> bool:
    tables = (getattr(sys.modules[name], table) for name, table in TABLES.items() if name in sys.modules)
    return any(_module(function).partition(".")[0] not in LIBRARIES for table in tables for function in table.values())


def _module(function: Any) -> str:
    """Where the function is from that was given; torch wraps some of its own."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or "torch"


@functools.lru_cache(maxsize=1)
def torch_sources() -> tuple[str, ...]:
    """Size and time of each file of torch that takes part in compiling."""
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
    """Where Inductor keeps what it compiled; None where it does not."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def condition_of(compiled: Any) -> str:
    """A digest of what Inductor takes for granted of the sizes of what it compiled; "" for nothing."""
    return _digest(getattr(compiled, "guards_expr", None))


def _digest(guards: str | None) -> str:
    return hashlib.sha256(guards.encode()).hexdigest() if guards else ""


def load_compiled(key: str, condition: str = "") -> Compiled | None:
    """What Inductor keeps under ``key`` with the guards of which ``condition`` is the digest; None where there is nothing."""
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
    """As Inductor does it, which looks after Triton's kernels."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        return FxGraphCache.load_with_key(key, [], [], True, None, False, constants, is_it)[0]


def _load_for_cpu(graph: Any, constants: Any) -> None:
    """The part of that which C++ needs, without what compiles: importing it takes half a second."""
    from torch._dynamo.utils import counters

    with light_imports():
        graph.after_deserialization(constants)
    counters["inductor"]["fxgraph_cache_hit"] += 1
