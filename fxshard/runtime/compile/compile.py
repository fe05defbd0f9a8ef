"""compile: from a bound program to a callable on local tensors, by Inductor or eager; differentiable if it is for training."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from fxshard._torch_compat.inductor.inductor import inductor_compile, inductor_mode, inductor_output_strides, without_frames
from fxshard._torch_compat.sizes.expressions import divided
from fxshard._torch_compat.sizes.symbols import oblivious
from fxshard.errors import OptionError, RunError, closest
from fxshard.layout.layouts import Layout
from fxshard.passes.after_lowering.forward_backward import forward_results, returned
from fxshard.passes.pipeline import PIPELINE
from fxshard.passes.runner import Dump, Pass, PassRecord, dump_folder, run_passes, timed
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.compile import artefact_cache
from fxshard.runtime.compile.artefact_cache import CacheEntry, make_cache_entry
from fxshard.runtime.compile.compiled import Artefact, BoxedFunction, CompiledProgram
from fxshard.runtime.compile.compiler_check import wait_for_compiler_check
from fxshard.runtime.compile.flex_kernels import use_flex_kernels
from fxshard.runtime.compile.outline import outline
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.rank_graph.common_subexpressions import merge_equal_calls, merge_equal_in_halves
from fxshard.runtime.rank_graph.expand_draws import expand_draws
from fxshard.runtime.rank_graph.in_place import write_in_place
from fxshard.runtime.rank_graph.partition import Partition, is_size
from fxshard.runtime.rank_graph.rank_graph import breaks_limit, check_limit, has_backward, rank_graph, split_graph
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.watchdog import Watchdog

log = logging.getLogger("fxshard")
COMPILERS = ("inductor", "eager")

_ARTEFACTS: WeakValueDictionary[Any, Artefact] = WeakValueDictionary()


def compile_program(
    bound: BoundProgram,
    compiler: str = "inductor",
    dump: Dump = None,
    timeout: float = TIMEOUT,
    debug: bool = False,
    cache: bool = True,
    mode: str = "default",
    lazy: bool = False,
) -> CompiledProgram:
    """Compiles ``bound``; within a process, programs and ranks with equal local graphs share one artefact.

    ``lazy``: whether to compile on first use, not now.
    ``dump`` as in ``fxshard.plan``. ``timeout``: seconds after which a lost rank is an error.
    ``debug``: whether ranks compare each collective before they issue it. ``cache``: whether to use code that another process compiled,
    unless stages are dumped. ``mode``: Inductor's, as in ``torch.compile``. Raises OptionError for an unknown ``compiler``.
    """
    if compiler not in COMPILERS:
        raise OptionError(f"unknown compiler {compiler!r}{closest(compiler, COMPILERS)}", remedy=f"use one of {', '.join(COMPILERS)}")
    compiled = CompiledProgram(bound, partial(_artefact, bound, compiler, dump, cache, mode), Watchdog(bound, timeout, debug))
    if not lazy:
        compiled.compile()
    return compiled


def _artefact(bound: BoundProgram, compiler: str, dump: Dump, cache: bool, mode: str) -> Artefact:
    """The artefact, shared with equal programs of this process."""
    key = (bound.program.hash, bound.size_class, bound.groups, str(bound.device), compiler, mode)
    artefact = _ARTEFACTS.get(key)
    if artefact is None:
        with inductor_mode(mode), oblivious() if bound.program.sizes else contextlib.nullcontext():
            artefact = _ARTEFACTS[key] = _load_or_compile(CompileState(bound, compiler), dump, cache)
    return artefact


def _load_or_compile(b: CompileState, dump: Dump, cache: bool) -> Artefact:
    """The artefact, from the cache on disk or compiled."""
    with timed("wait for the compiler"):
        wait_for_compiler_check()
    with timed("look up code"):
        path = artefact_cache.file_for(b.bound) if cache and b.compiler == "inductor" else None
    if path is not None and dump_folder(dump) is None:
        with timed("load code"):
            known = artefact_cache.read(path, b.program.sizes)
        if known is not None:
            kept, forward, backward = known
            log.info("the compiled code is from the cache: %s", path)
            ends = _artefact_fields(b, kept.kept_inputs, kept.numbers, lambda: _graphs(run_passes(COMPILING[:-1], b, False)), kept.written)
            return replace(Artefact(forward, backward, *ends), guards=kept.guards)
    made = run_passes(COMPILING, b, dump, first=len(PIPELINE))
    assert made.artefact is not None
    guards = b.program.noted_guards() if b.program.sizes else ()
    if path is not None and made.cache_entry is not None:
        artefact_cache.write(path, replace(made.cache_entry, guards=guards))
    return replace(made.artefact, guards=guards)


@dataclass(frozen=True, eq=False)
class CompileState:
    """The state between passes: fields are None until their pass has run; ``parts`` stays None for inference."""

    bound: BoundProgram
    compiler: str
    module: fx.GraphModule | None = None
    parts: Partition | None = None
    artefact: Artefact | None = None
    cache_entry: CacheEntry | None = None
    records: tuple[PassRecord, ...] = ()

    @property
    def program(self) -> ShardedProgram:
        return self.bound.program


def _bind(b: CompileState) -> tuple[CompileState, str]:
    module = rank_graph(b.bound, b.compiler)
    groups = ", ".join(f"{axis} as {name}" for axis, name in b.bound.groups)
    return replace(b, module=module), f"{len(module.graph.nodes)} nodes for {b.bound.coordinate} on {b.bound.device}, groups {groups}"


def _partition(b: CompileState) -> tuple[CompileState, str]:
    assert b.module is not None
    parts = split_graph(b.bound, b.module)
    if b.compiler == "eager":  # other compilers fuse operators, which the graph does not show
        check_limit(b.bound, b.module, parts)
    if parts is None:
        return b, "nothing to differentiate: one graph"
    sizes = f"forward of {len(parts.forward.graph.nodes)} nodes, backward of {len(parts.backward.graph.nodes)}"
    return replace(b, parts=parts), f"{sizes}, {parts.kept} values and {len(parts.kept_inputs)} inputs kept"


def _merge(b: CompileState) -> tuple[CompileState, str]:
    """Common-subexpression elimination; skipped for eager, to keep to the plan's memory model, and if it would exceed the limit."""
    assert b.module is not None
    if b.compiler == "eager":
        return b, "calls stay as they are"
    if b.parts is None:
        module = _copy_module(b.module)
        merged, dropped = replace(b, module=module), merge_equal_calls(module)
    else:
        copies = replace(b.parts, forward=_copy_module(b.parts.forward), backward=_copy_module(b.parts.backward))
        parts, dropped = merge_equal_in_halves(copies, forward_results(b.program))
        merged = replace(b, parts=parts)
    said = f"{dropped} duplicate calls"
    if breaks_limit(b.bound, (b.module, b.parts), (merged.module, merged.parts)):
        return b, f"{said}, kept: merging them would exceed memory_limit"
    return merged, said


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(torch.nn.Module(), graph)


def _expand_draws(b: CompileState) -> tuple[CompileState, str]:
    """Expands draws in place; eager keeps each as one operator, which computes the same bits."""
    if b.compiler == "eager":
        return b, "draws stay operators"
    assert b.module is not None
    count = sum(map(expand_draws, (b.module,) if b.parts is None else (b.parts.forward, b.parts.backward)))
    return b, f"{count} draws expanded to arithmetic"


def _compile(b: CompileState) -> tuple[CompileState, str]:
    assert b.module is not None
    results = forward_results(b.program)
    # the plan's memory does not count the values that an outlined repeat holds until its end
    said, skip_outline = f"by {b.compiler}", b.program.plan.memory_limit is not None
    if b.parts is None:
        module = _copy_module(b.module)
        static = b.compiler == "inductor" and not b.program.sizes
        written = write_in_place(b.program, module.graph) if static else ()
        whole = _compile_graph(module, b.compiler, results, skip_outline=skip_outline, is_inference=True)
        assert whole is not None
        artefact = Artefact(without_frames(whole), None, *_artefact_fields(b, (), (), lambda: (module,), written))
        return replace(b, artefact=artefact, cache_entry=make_cache_entry(whole, None, (), (), written)), said
    count = sum(o.kind == "gradient" for o in b.program.outputs)
    forward, backward = _compile_halves(b.parts, b.compiler, results, count, bool(b.program.sizes), skip_outline)
    inputs = [n for n in b.parts.forward.graph.nodes if n.op == "placeholder"]
    kept = tuple(i for i in b.parts.kept_inputs if not is_size(inputs[i]))
    between = kept, _kept_numbers(b.parts.forward, results)
    artefact = Artefact(without_frames(forward), without_frames(backward), *_artefact_fields(b, *between, lambda: _graphs(b)))
    return replace(b, artefact=artefact, cache_entry=make_cache_entry(forward, backward, *between)), said


def _graphs(b: CompileState) -> tuple[fx.GraphModule, ...]:
    assert b.module is not None
    return (b.module,) if b.parts is None else (b.parts.forward, b.parts.backward)


def _artefact_fields(
    b: CompileState,
    kept_inputs: tuple[int, ...],
    numbers: tuple[int, ...],
    graphs: Callable[[], tuple[fx.GraphModule, ...]],
    written: tuple[int, ...] = (),
) -> Any:
    """The fields of an artefact after its callables."""
    results = forward_results(b.program)
    if not has_backward(b.program):
        return results, (), (), (), (), (), (), graphs, written
    of = _gradient_of(b.program, len(b.bound.axes))
    gradients = of, _gradient_layouts(b.program, of), _follows(b.program, of)
    return results, kept_inputs, _tangent_of(b.program), *gradients, numbers, graphs, written


def _compile_halves(
    parts: Partition, compiler: str, results: int, gradients: int, dynamic: bool, skip_outline: bool = False
) -> tuple[BoxedFunction, BoxedFunction]:
    """Forward and backward, each compiled by one of the processes of this machine that need the same code.

    The backward reads saved values with the strides that the compiled forward gives them; with ``dynamic`` sizes those are the graph's.
    If another process is compiling the forward, this one first compiles the backward, for the graph's strides, and again if they differ.
    """
    visible = len(returned(parts.forward.graph)) if dynamic else results
    make_forward = partial(_compile_graph, parts.forward, compiler, visible, skip_outline=skip_outline)
    make_backward = partial(_compile_graph, parts.backward, compiler, gradients, skip_outline=skip_outline, is_backward=True)
    forward, early = make_forward(wait=False), None
    if forward is None:
        early = make_backward(wait=False)
        forward = make_forward()
    if compiler == "inductor" and not dynamic:
        strides = inductor_output_strides(forward)
        if _update_strides(parts.backward, strides, results, len(parts.kept_inputs), parts.kept):
            early = None
    backward = early or make_backward()
    assert forward is not None and backward is not None
    return forward, backward


def _parts(b: CompileState) -> str:
    return "one graph" if b.parts is None else f"forward\n{b.parts.forward.graph}\n\nbackward\n{b.parts.backward.graph}"


def _code(b: CompileState) -> str:
    assert b.artefact is not None
    return "\n\n".join(graph.print_readable(print_output=False) for graph in b.artefact.graphs)


COMPILING: tuple[Pass, ...] = (
    Pass("bind", _bind, lambda b: str(b.module.graph)),
    Pass("partition", _partition, _parts),
    Pass("merge", _merge, _parts),
    Pass("expand_draws", _expand_draws, _parts),
    Pass("compile", _compile, _code),
)
"""The passes that a rank applies to a program, after ``fxshard.passes.PIPELINE``."""


def _compile_graph(
    module: fx.GraphModule, compiler: str, visible: int, *, wait: bool = True, skip_outline: bool = False, **kind: bool
) -> BoxedFunction | None:
    """``module`` as one callable; its first ``visible`` results keep the strides that they have in the graph.

    ``wait``: whether to wait for another process that is compiling the same graph; if False, returns None then. ``skip_outline``: whether
    to compile repeats one by one.
    """
    if compiler == "eager":
        return _boxed(module)
    copy = _copy_module(module)
    if not skip_outline:
        outline(copy)
    use_flex_kernels(copy)
    output = copy.graph.output_node()
    output.meta["user_visible_output_idxs"] = [i for i in range(visible) if _is_tensor(output.args[0][i])]
    inputs = [n.meta["val"] for n in copy.graph.nodes if n.op == "placeholder"]
    try:
        return inductor_compile(copy, inputs, wait=wait, **kind)
    except Exception as error:
        what = f"Inductor could not compile this rank's graph: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        raise RunError(what, remedy='compiler="eager" runs the same graph without it; dump= writes the graph') from error


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _boxed(module: fx.GraphModule) -> BoxedFunction:
    """``module`` as a function of one list, which it clears so that each input is freed after its last use."""
    graph = fx.Graph()
    inputs, values = graph.placeholder("inputs"), {}
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(placeholders):
        values[node] = graph.call_function(operator.getitem, (inputs, i))
    graph.call_method("clear", (inputs,))
    graph.output(graph.graph_copy(module.graph, values))
    for node in graph.find_nodes(op="call_function", target=operator.truediv):  # division by zero: Python raises, C++ gives nan
        node.target = divided
    run: BoxedFunction = fx.GraphModule(module, graph).forward  # not the module itself, for which global module hooks would be called
    return run


def _update_strides(backward: fx.GraphModule, strides: list[tuple[int, ...] | None] | None, results: int, start: int, kept: int) -> bool:
    """Gives the saved values in ``backward`` the strides of the compiled forward; returns whether any changed."""
    if strides is None:
        return False
    changed = False
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"][start : start + kept]
    for node, stride in zip(placeholders, strides[results:], strict=True):
        value = node.meta["val"]
        if stride is not None and value.stride() != stride:
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
            changed = True
    return changed


def _tangent_of(program: ShardedProgram) -> tuple[int, ...]:
    positions = {o.tangent: i for i, o in enumerate(program.outputs)}
    return tuple(positions[end.name] for end in program.inputs if end.kind == "tangent")


def _gradient_of(program: ShardedProgram, axes: int) -> tuple[int | None, ...]:
    """For each input of the forward (without tangents, with the axis indices at the end), the index of its gradient, or None."""
    names = [o.name for o in program.outputs if o.kind == "gradient"]
    positions = {name: i for i, name in enumerate(names)}
    primals = [end for end in program.inputs if end.kind != "tangent"]
    found = [positions.get(end.name) if end.kind in ("parameter", "input") else None for end in primals]
    return (*found, *[None] * axes)


def _gradient_layouts(program: ShardedProgram, gradient_of: Sequence[int | None]) -> tuple[Layout | None, ...]:
    """For each input of the forward, the layout of its gradient; None if that is the input's, or if there is no gradient."""
    layouts = [x for x, o in zip(program.output_layouts, program.outputs, strict=True) if o.kind == "gradient"]
    primals = [x for x, end in zip(program.input_layouts, program.inputs, strict=True) if end.kind != "tangent"]
    found = [None if i is None or layouts[i] == own else layouts[i] for i, own in zip(gradient_of, primals, strict=False)]
    return (*found, *[None] * (len(gradient_of) - len(found)))


def _follows(program: ShardedProgram, gradient_of: Sequence[int | None]) -> tuple[tuple[int, ...] | None, ...]:
    """For each input of the forward, the results on whose tangents its gradient depends; None: on all, or it has no gradient."""
    positions = {o.tangent: i for i, o in enumerate(program.outputs) if o.tangent is not None}
    known = [o.follows for o in program.outputs if o.kind == "gradient"]
    found = [None if i is None else known[i] for i in gradient_of]
    return tuple(None if names is None else tuple(positions[name] for name in names) for names in found)


def _kept_numbers(forward: fx.GraphModule, results: int) -> tuple[int, ...]:
    kept = forward.graph.output_node().args[0][results:]
    return tuple(i for i, x in enumerate(kept) if not _is_tensor(x))
