"""Private names of torch (2.13): Inductor, and the min-cut partitioner of joint graphs.

What would replace it: ``torch.compile`` of a graph that is partitioned already; ``torch.compiler`` with options per call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from fxshard._torch_compat.inductor import exchanges, pack
from fxshard._torch_compat.inductor.cpp import instructions_in_key
from fxshard._torch_compat.inductor.joined_kernels import joined_kernels
from fxshard._torch_compat.sizes.symbols import ONE_THREAD, GuardRefused, refusing_guards

if TYPE_CHECKING:
    from torch import fx

log = logging.getLogger("fxshard")
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
"""Operator that calls a subgraph, held by the graph's module: (subgraph, name, *tensors) -> tuple of tensors. Inductor compiles it once."""
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def inductor_compile(module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, wait: bool = True, **options: Any) -> Compiled | None:
    """Compile an aten graph with fake example inputs by Inductor. The result takes one list, which it empties. Changes ``module``.

    Processes of one machine that compile the same graph at the same time share the work: one compiles it, the others take it from
    Inductor's cache. ``wait=False``: return None if another process is compiling it. Runs in a tracing context, since Inductor caches on
    disk only what it compiles under a known fake mode.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx import GraphModule

    pack.register()
    exchanges.register()
    for part in module.modules():
        if isinstance(part, GraphModule):
            pack.pack_in_place(part.graph)
            part.recompile()
    given = list(inputs)
    env = next((value.node.shape_env for value in given if isinstance(value, torch.SymInt)), None)
    mode = tracing(TracingContext(detect_fake_mode(given)))
    here = instructions_in_key() if _computes_on_cpu(module) else contextlib.nullcontext()
    with mode, here, any_size(env), joined_kernels(), _turn(module, given, options, wait) as ours:
        return compile_fx_inner(module, given, **options) if ours else None


def _computes_on_cpu(module: fx.GraphModule) -> bool:
    values = (value for node in module.graph.nodes if node.op == "call_function" for value in tree_leaves(node.meta.get("val")))
    return any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)


@contextlib.contextmanager
def _turn(module: fx.GraphModule, inputs: list[torch.Tensor], options: Mapping[str, Any], wait: bool) -> Iterator[bool]:
    """Hold a lock on the graph among the processes that share Inductor's cache, if it is cacheable. Yields whether to compile it now:
    False if another process holds the lock and ``wait`` is False."""
    from filelock import Timeout
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch.utils._filelock import FileLock

    key = _cache_key(module, inputs, options)
    if key is None:
        yield True
        return
    lock = FileLock(os.path.join(get_lock_dir(), f"fxshard-{key}.lock"), timeout=LOCK_TIMEOUT if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        if wait:
            log.warning("another process has compiled the same graph for %d seconds; this one compiles it too", LOCK_TIMEOUT)
        yield wait
        return
    try:
        yield True
    finally:
        lock.release()


def _cache_key(module: fx.GraphModule, inputs: list[torch.Tensor], options: Mapping[str, Any]) -> str | None:
    """A key that equal graphs share; None where Inductor does not cache the graph."""
    from torch._dynamo.utils import count_calls, counters
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache

    if config.force_disable_caches or not config.fx_graph_cache or not count_calls(module.graph):
        return None
    before = dict(counters["inductor"])
    found, _ = FxGraphCache.prepare_key(module, inputs, dict(options), [], False)
    counters["inductor"].clear()
    counters["inductor"].update(before)
    return None if found is None else found[0]


@contextlib.contextmanager
def any_size(env: Any) -> Iterator[None]:
    """Within it, Inductor compiles graphs with the symbolic sizes of ``env`` (None: without any), with fewer guards.

    - Whether a sum uses the more precise accumulation helper, and in which order dims are laid out, is decided by the example without a
      guard, since either choice is correct.
    - Tensors whose overlap depends on sizes are assumed to overlap, so that nothing is computed in place there.
    - The strides of a view are first computed without guards, which usually succeeds.
    - The guards of a cache entry are text with Python's ``min`` and ``max``, which would add guards when comparing symbols. They are
      evaluated with symbolic versions, so that a cache hit adds no guards.
    """
    if env is None:
        yield
        return
    from torch._inductor import ir, utils
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.fx_passes import reinplace
    from torch._subclasses import fake_impls
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    ends = {"min": lambda *values: functools.reduce(torch.sym_min, values), "max": lambda *values: functools.reduce(torch.sym_max, values)}

    def evaluated(code: str, args: Sequence[Any]) -> bool:
        functions = {**SYMPY_INTERP, **ends}
        return bool(eval(code, functions, {"L": {f"t{i}": x for i, x in enumerate(args)}}))  # torch evaluates it too; the text is torch's

    def strides_of_view(*args: Any, size_oblivious: bool = False) -> Any:
        found = strides(*args, size_oblivious=True)
        return strides(*args) if found is None and not size_oblivious else found

    def unnoted(real: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            with env.suppress_guards():
                return real(*args, **kwargs)

        return asked

    def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
        try:
            with refusing_guards(env):
                return found(tensors)
        except GuardRefused:
            return set(range(len(tensors)))

    strides, found = fake_impls._compute_stride, reinplace.compute_overlapping_tensors
    with ONE_THREAD, contextlib.ExitStack() as stack:
        for owner, name in ((CppKernel, "need_use_acc_helper"), (ir, "argsort_sym"), (utils, "argsort_sym")):
            stack.enter_context(mock.patch.object(owner, name, unnoted(getattr(owner, name))))
        stack.enter_context(mock.patch.object(fake_impls, "_compute_stride", strides_of_view))
        stack.enter_context(mock.patch.object(reinplace, "compute_overlapping_tensors", overlapping))
        env.evaluate_guards_expression = evaluated
        stack.callback(delattr, env, "evaluate_guards_expression")
        yield


def takes_subgraphs() -> bool:
    """Whether Inductor, with its current settings, supports calls of subgraphs; its C++ wrapper does not."""
    from torch._inductor import config

    return not config.cpp_wrapper


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of ``torch.compile`` and the Inductor settings of each."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_mode(mode: str) -> contextlib.AbstractContextManager[Any]:
    """Within it, Inductor has the settings of ``mode``."""
    from torch._inductor import config

    return contextlib.nullcontext() if mode == "default" else config.patch(inductor_modes()[mode])


def replays_cuda_graphs(mode: str) -> bool:
    """Whether Inductor records and replays CUDA graphs in ``mode``."""
    return bool(inductor_modes()[mode].get("triton.cudagraphs"))


def without_frames(compiled: Compiled) -> Compiled:
    """``compiled`` (from ``inductor_compile``) without the frames of ``CompiledFxGraph.__call__``, which saves 0.9 us per call.

    ``current_callable`` keeps what torch put between these frames and the generated code: copies of misaligned inputs, CUDA graphs, a
    wrapper for modes. For a CPU graph the frames themselves contain only

    - a record of the order of graphs: if it is active, the call goes through the frames;
    - a record for the profiler, which is made here, since theirs needs all of Inductor and code from a cache is loaded without it;
    - the end of a bundle of Triton tunings, and metrics of tuning in a call: the CPU has none.

    Anything else is returned unchanged, such as a graph without operators, which torch returns as its own forward.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch.autograd import profiler

    if not isinstance(compiled, CompiledFxGraph) or not compiled.device_types <= {"cpu"}:
        return compiled
    inner = compiled.current_callable
    assert inner is not None

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        debug = sys.modules.get("torch._inductor.debug")  # not imported here, since it imports all of Inductor
        if debug is not None and debug.RECORD_GRAPH_EXECUTION:
            return compiled(inputs)  # also keeps it alive, since its deletion would delete its code
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"## Call CompiledFxGraph {compiled._fx_graph_cache_key} ##"):
                return inner(inputs)
        return inner(inputs)

    return run


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor's lowerings rely on."""
    import torch._inductor.lowering  # noqa: F401  (some decompositions need it)
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_output_strides(compiled: Any) -> list[tuple[int, ...] | None] | None:
    """The strides of a compiled graph's outputs; None where they are those of the graph."""
    strides = getattr(compiled, "output_strides", None)
    return None if strides is None else [None if s is None else tuple(int(x) for x in s) for s in strides]


def values_to_save(
    graph: fx.Graph, inputs: list[fx.Node], forward: Iterable[fx.Node], closure: Iterable[fx.Node], ends: Iterable[fx.Node]
) -> list[fx.Node]:
    """torch's minimum cut: the values of a joint graph to save for the backward; others are rematerialised.

    ``forward``: nodes that run in the forward; ``closure``: nodes that can run only in the backward; ``ends``: outputs of the backward.
    Placeholders of tangents must have "tangents" in their names, those of ``inputs`` must not.
    """
    from torch._functorch.partitioners import NodeInfo, choose_saved_values_set
    from torch.utils._ordered_set import OrderedSet

    first = OrderedSet(forward)
    late = OrderedSet(closure)
    required = OrderedSet([*late, *ends])
    for node in reversed(graph.nodes):
        nearest = min((user.dist_from_bw + 1 for user in node.users), default=10**9)
        node.dist_from_bw = nearest if node in first else 10**9 if node.op == "output" else 0
    unclaimed = OrderedSet(n for n in graph.nodes if n not in first and n not in required)
    order = {n: i for i, n in enumerate(n for n in graph.nodes if n in first)}
    return choose_saved_values_set(graph, NodeInfo(inputs, first, required, late, unclaimed, order, OrderedSet()))
