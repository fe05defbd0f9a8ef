"""Inductor, and the partitioner that its joint graphs are cut with."""

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

from fxshard._torch_compat.inductor import pack
from fxshard._torch_compat.inductor.joined_kernels import joined_kernels
from fxshard._torch_compat.symbols import ONE_THREAD, GuardRefused, refusing_guards

if TYPE_CHECKING:
    from torch import fx

log = logging.getLogger("fxshard")
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
"""Calls a subgraph, an attribute of the module of its graph: (subgraph, name, *tensors) -> tuple of tensors. Inductor compiles it once."""
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def inductor_compile(module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, wait: bool = True, **options: Any) -> Compiled | None:
    """Inductor on an aten graph with fake example inputs; the result takes one list, which it empties. Changes ``module``.

    Processes of one machine that want the same graph at the same time share the work: one compiles it, the others take it from Inductor's
    cache. ``wait=False``: None where another is at it. Within a context of tracing: Inductor keeps on disk only what it compiles for a
    mode that it knows.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx import GraphModule

    pack.register()
    for part in module.modules():
        if isinstance(part, GraphModule):
            pack.pack_in_place(part.graph)
            part.recompile()
    given = list(inputs)
    env = next((value.node.shape_env for value in given if isinstance(value, torch.SymInt)), None)
    any_size = contextlib.nullcontext() if env is None else _any_size(env)
    mode = tracing(TracingContext(detect_fake_mode(given)))
    with mode, any_size, joined_kernels(), _turn(module, given, options, wait) as ours:
        return compile_fx_inner(module, given, **options) if ours else None


@contextlib.contextmanager
def _turn(module: fx.GraphModule, inputs: list[torch.Tensor], options: Mapping[str, Any], wait: bool) -> Iterator[bool]:
    """Holds the graph among the processes that share Inductor's cache, if it is kept there; False where another holds it."""
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
    """A name that equal graphs have; None where Inductor does not keep what it compiles."""
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
def _any_size(env: Any) -> Iterator[None]:
    """While Inductor compiles for symbols.

    Whether a sum goes through a helper that adds up more precisely, and in which order dims are laid out, is asked of the example and not
    noted as a guard, for either is right. Whether tensors overlap, where that depends on sizes, is taken for true: nothing is computed in
    place there. The strides of a view are first looked for without asking anything: mostly they follow whatever the sizes. What is found
    in Inductor's cache brings the guards that were noted when it was compiled, as text with Python's ``min`` and ``max``, which would ask
    of symbols which is the smaller one: they become symbols' own, so that a hit takes no more for granted.
    """
    from torch._inductor import ir, utils
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.fx_passes import reinplace
    from torch._subclasses import fake_impls
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    def evaluated(code: str, args: Sequence[Any]) -> bool:
        functions = {**SYMPY_INTERP, "min": _least, "max": _greatest}
        return bool(eval(code, functions, {"L": {f"t{i}": x for i, x in enumerate(args)}}))  # as torch does, of text of its own

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


def _least(*values: Any) -> Any:
    return functools.reduce(torch.sym_min, values)


def _greatest(*values: Any) -> Any:
    return functools.reduce(torch.sym_max, values)


def takes_subgraphs() -> bool:
    """Whether Inductor, as it is set, can write a call of a subgraph: its wrapper in C++ cannot."""
    from torch._inductor import config

    return not config.cpp_wrapper


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of ``torch.compile`` and the settings of Inductor that each stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_mode(mode: str) -> contextlib.AbstractContextManager[Any]:
    """While Inductor compiles: the settings of ``mode``."""
    from torch._inductor import config

    return contextlib.nullcontext() if mode == "default" else config.patch(inductor_modes()[mode])


def replays_cuda_graphs(mode: str) -> bool:
    """Whether ``mode`` asks Inductor to record CUDA graphs and to replay them."""
    return bool(inductor_modes()[mode].get("triton.cudagraphs"))


def without_frames(compiled: Compiled) -> Compiled:
    """``compiled``, of ``inductor_compile``, without the frames of ``CompiledFxGraph.__call__``, 0.9 us a call.

    What torch put between those frames and the generated code (copies of misaligned inputs, CUDA graphs, a wrapper for
    modes) is ``current_callable`` and stays. Of the frames themselves, for a graph of the CPU alone:

    - a record for the profiler, and one of the order of graphs: wherever one is wanted the call goes by the frames;
    - the end of a bundle of Triton's tunings, and metrics of what is tuned and recorded in a call: there are none.

    Anything else stays as it is, a graph without operators, which torch hands back as its own forward, among it.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch.autograd import profiler

    if not isinstance(compiled, CompiledFxGraph) or not compiled.device_types <= {"cpu"}:
        return compiled
    inner = compiled.current_callable
    assert inner is not None

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        debug = sys.modules.get("torch._inductor.debug")  # who records the order of graphs has imported it; it brings all of Inductor
        if profiler._is_profiler_enabled or (debug is not None and debug.RECORD_GRAPH_EXECUTION):
            return compiled(inputs)  # which must live as long as this: it takes the parts of its code along when it goes
        return inner(inputs)

    return run


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor's lowerings count on."""
    import torch._inductor.lowering  # noqa: F401  (some of them ask for it)
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_output_strides(compiled: Any) -> list[tuple[int, ...] | None] | None:
    """Strides that a compiled graph gives its outputs; None where it keeps those of the graph."""
    strides = getattr(compiled, "output_strides", None)
    return None if strides is None else [None if s is None else tuple(int(x) for x in s) for s in strides]


def values_to_save(
    graph: fx.Graph, inputs: list[fx.Node], forward: Iterable[fx.Node], closure: Iterable[fx.Node], ends: Iterable[fx.Node]
) -> list[fx.Node]:
    """torch's minimum cut: which values of a joint graph to keep for the backward rather than compute again.

    ``forward``: the nodes that run in the forward; ``closure``: those that can only run in the backward; ``ends``: what
    the backward returns. Placeholders of tangents have "tangents" in their name, those of ``inputs`` have not.
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
