"""trace: a model and example inputs -> PlanningGraph, on CPU fakes whatever the model's device."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fxshard._torch_compat import pytree
from fxshard._torch_compat.aot import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
)
from fxshard._torch_compat.dynamo.capture import sizes_from_data, without_code, without_guards, without_headers
from fxshard._torch_compat.dynamo.functions import all_functions
from fxshard._torch_compat.dynamo.hooks import without_global_hooks
from fxshard._torch_compat.dynamo.kernels import kernels_captured
from fxshard._torch_compat.dynamo.side_effects import noted_side_effects
from fxshard._torch_compat.dynamo.transforms import transforms_ended
from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode, storage_key
from fxshard._torch_compat.flex_attention import flex_attention_of_any_device
from fxshard._torch_compat.fully_shard import is_fully_sharded
from fxshard._torch_compat.nodes import is_reserved
from fxshard._torch_compat.sizes.symbols import is_symbolic
from fxshard.errors import OptionError, RunError, TraceError, a_kind
from fxshard.graph.objects import CallResultSpec, on_cpu, open_call
from fxshard.graph.planning_graph import GraphInput, GraphOutput, PlanningGraph, constants_of, is_tensor, source_line, with_fixed
from fxshard.graph.side_effects import Attribute
from fxshard.passes.trace import joint_cache
from fxshard.passes.trace.dtensor_calls import declared_shards, dtensor_calls
from fxshard.passes.trace.expert_calls import expert_calls
from fxshard.passes.trace.fakes.fake_model import Call, fake_copy, fake_tensor
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, cast_input, cast_parameters, insert_casts, unreduced
from fxshard.passes.trace.fakes.rebind import parameter_names
from fxshard.passes.trace.fakes.symbols import RETURNED_SIZE, Symbols, fold_sizes
from fxshard.passes.trace.fakes.tensor_kinds import check_dense
from fxshard.passes.trace.functions.data_dependent import REPLACEMENTS, DataDependentMode
from fxshard.passes.trace.functions.decompose import planning_decompositions
from fxshard.passes.trace.functions.draws import check_draws, number_draws
from fxshard.passes.trace.functions.flex import expand_flex_attention
from fxshard.passes.trace.functions.inlined import inlined
from fxshard.passes.trace.functions.neutralise import Neutralise
from fxshard.passes.trace.functions.recurrent import is_packed, packed_error, recurrent_captured
from fxshard.passes.trace.named_layouts import OnMesh, meshes_of, named_layouts
from fxshard.passes.trace.output_recorders import install_output_recorders
from fxshard.passes.trace.python_state.assigned import write_assigned
from fxshard.passes.trace.python_state.bound import is_bound
from fxshard.passes.trace.python_state.gradient_taps import TAPS, tap_name
from fxshard.passes.trace.python_state.hooks import TracedHooks
from fxshard.passes.trace.python_state.objects import Reads, capture_call, outcome_of_call
from fxshard.passes.trace.python_state.side_effects import TracedSideEffects
from fxshard.passes.trace.regions import regions
from fxshard.passes.trace.repeats.repeated import RepeatedLayers, first_that_works
from fxshard.passes.trace.returned import drop_unused_returns, other_names, recording_returns, values_of_modules, with_other_names
from fxshard.passes.trace.rewrites.constants import replace_constants, replace_tensor_attributes
from fxshard.passes.trace.rewrites.effect_tokens import drop_tokens
from fxshard.passes.trace.rewrites.known_masks import use_known_masks
from fxshard.passes.trace.rewrites.number_outputs import drop_wrong_bounds, tensors_of_numbers
from fxshard.passes.trace.rewrites.probe import probe, returns_new_memory
from fxshard.passes.trace.rewrites.scalars import keep_numbers_in_tensors
from fxshard.passes.trace.rewrites.shared_memory import guard_shared_memory
from fxshard.passes.trace.rewrites.strides import replace_as_strided
from fxshard.passes.trace.rewrites.triton_kernels import replace_kernel_calls
from fxshard.passes.trace.trace_errors import errors_of_the_model, readable_errors
from fxshard.shapes import DynamicDim
from fxshard.shapes.arguments import path_name

aten = torch.ops.aten
WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
"""Wrappers that manage the parameters and gradients of their module."""
OF_WRAPPED = "give the plain model: fxshard shards it itself; its plan covers data parallelism too"
OF_FULLY_SHARDED = (
    "give the plain model with parallel={'dp': fxshard.FullyShard()}, or hand this one to "
    "fxshard.parallelize(model, args, device_mesh), which takes fully_shard off and keeps the parameters as they are"
)


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    mixed_precision: MixedPrecision | None = None,
    dynamic: Sequence[DynamicDim] = (),
    observe: bool = False,
    written: Collection[Attribute] = (),
    cache: bool = False,
) -> PlanningGraph:
    """Traces ``model(*args, **kwargs)``; real, fake and meta models give the same graph.

    ``train``: joint forward and backward of all differentiable outputs, whose tangents become inputs. ``dynamic``: dims with symbolic
    sizes; the graph has the example's sizes, and its ``family`` provides all others. ``observe``: the graph also returns the arguments of
    hooks that must run after it, and the values that the forward assigns to attributes (see ``fxshard.passes.trace.python_state``).
    ``written``: attributes that other calls set. ``cache``: whether the joint graph may come from a file, and is kept in one (see
    ``fxshard.passes.trace.joint_cache``). Raises TraceError with the user's line if the model is not one graph, OptionError if ``model``
    is not a module or ``args`` not a tuple of arguments.
    """
    check_call(model, args)
    arguments = open_call(args, kwargs or {})[:2]
    _check_tensors(model, arguments)
    install_output_recorders(model, kwargs or {})
    symbols, hooks = Symbols(dynamic), TracedHooks(observe, train)
    call = Call(model, arguments, train, mixed_precision, tuple(dynamic), cache)
    effects = TracedSideEffects(call, observe, written)

    def capture(replacements: bool, layers: RepeatedLayers) -> tuple[fx.GraphModule, dict[str, str], pytree.TreeSpec]:
        def once() -> tuple[fx.GraphModule, dict[str, str], pytree.TreeSpec]:
            symbols.reset()
            again = RepeatedLayers(layers.wanted)
            return _capture(call, REPLACEMENTS if replacements else {}, symbols, hooks, again, effects)

        return effects.settle(lambda: hooks.settle(once))

    with readable_errors(type(model).__name__), _grad(train), without_code(), without_global_hooks(), symbols:
        joint, names, out_spec = first_that_works(model, capture)
    leaves, in_spec = pytree.tree_flatten_with_path(arguments)
    paths = [path_name(path) for path, leaf in leaves if not is_bound(leaf)]
    paths += map(tap_name, range(len(hooks.taps.known)))
    meshes = meshes_of({**dict(model.named_parameters()), **{path_name(path): leaf for path, leaf in leaves}})
    with symbols:
        graph = symbols.at_example(planning_graph(joint, names, paths, in_spec, out_spec, train, tied_names(model), meshes))
    marks = frozenset() if mixed_precision is None else unreduced(graph, mixed_precision)
    returned = with_other_names(graph.returned, other_names(model))
    graph = replace(graph, watched=hooks.watched, tapped=hooks.taps.tapped, side_effects=effects.found, fixed=effects.fixed)
    return replace(graph, constants=constants_of(*arguments), returned=returned, unreduced=marks, model=_name_of(model))


def _name_of(model: nn.Module) -> str:
    """The name of the user's class; "" for a graph, which has none."""
    return "" if isinstance(model, fx.GraphModule) else type(model).__name__


def _check_tensors(model: nn.Module, arguments: tuple[Any, Any]) -> None:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    named += [(path_name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(arguments, is_packed)[0]]
    for name, value in named:
        if is_packed(value):
            raise packed_error(name)
        if isinstance(value, torch.Tensor):
            check_dense(value, name)


def _capture(
    call: Call, replacements: Mapping[Any, Any], symbols: Symbols, hooks: TracedHooks, layers: RepeatedLayers, effects: TracedSideEffects
) -> tuple[fx.GraphModule, dict[str, str], pytree.TreeSpec]:
    """(the joint graph, the model's names of its parameters, the structure of its outputs)."""
    model, arguments, train, precision = call.model, call.arguments, call.train, call.precision
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.env.shape_env)
    fake_model = fake_copy(model, mode, train)
    paths, in_spec = pytree.tree_flatten_with_path(arguments)
    in_spec = on_cpu(in_spec)
    given = [symbols.fake(path_name(path), fake_tensor(a, mode, train)) for path, a in paths]
    leaves = given
    masters = {} if precision is None else cast_parameters(fake_model, precision)
    if precision is not None:
        leaves = [cast_input(a, precision) for a in given]
    fake_args, fake_kwargs = pytree.tree_unflatten(leaves, in_spec)
    flat = [a for a in leaves if not is_bound(a)]
    root, taps = effects.around(hooks.install(model, fake_model), fake_model), hooks.taps.inputs(mode, symbols)
    named = {TAPS: taps} if taps else {}
    plain = {path_name(path): leaf for (path, a), leaf in zip(paths, leaves, strict=True) if not isinstance(a, DTensor)}
    own_errors = hooks.errors(errors_of_the_model(fake_model, fake_args, fake_kwargs))
    again = DataDependentMode if replacements else contextlib.nullcontext
    captures = (
        mode,
        again(),
        inlined(),
        dtensor_calls(model),
        expert_calls(),
        _without_fast_paths(),
        flex_attention_of_any_device(),
        sizes_from_data(),
        regions(),
        all_functions(),
        kernels_captured(),
        recurrent_captured(),
        recording_returns(fake_model),
        hooks.watching(fake_model),
        layers.noted(fake_model),
        without_guards(),
        without_headers(),
    )
    with declared_shards(plain), contextlib.ExitStack() as stack, noted_side_effects() as changed, own_errors:
        for capture in captures:
            stack.enter_context(capture)

        def outcome() -> tuple[CallResultSpec, Reads] | None:
            twin = call.twin()
            return outcome_of_call(effects.around(hooks.recorded(model, twin.model), twin.model), twin.leaves, twin.spec, twin.mode)

        captured, out_spec = capture_call(root, leaves, in_spec, outcome, named)
    flat += taps
    symbols.record_guards(captured, flat)
    hooks.taps.name_sizes(symbols.name_of)
    effects.changed = tuple(changed)
    captured.graph.set_codegen(fx.graph.CodeGen())
    captured.recompile()
    layers.shorten(captured, fake_model)
    expand_flex_attention(captured)
    names = parameter_names(fake_model, captured)
    with again():
        effects.fixed = replace_tensor_attributes(captured, model, fake_model, names, flat)
        guard_shared_memory(captured, flat, fresh)
        separate_outputs(captured, flat)
    write_assigned(captured, fake_model, names)
    if precision is not None:
        given = [*(a for a in given if not is_bound(a)), *taps]
        insert_casts(captured, masters, flat, given, precision)
        flat = given
    layers.label(captured)
    joint = joint_graph(captured, flat, train, replacements, call.cache)
    symbols.refuse_returned(joint)
    fold_sizes(joint)
    layers.unroll(joint)
    return joint, names, out_spec


def check_call(model: Any, args: Any, fsdp2: bool = False) -> None:
    """Raises OptionError unless ``model`` is a module without FSDP or DDP and ``args`` a sequence, RunError if it is parallelized.

    ``fsdp2``: whether torch's ``fully_shard`` may have been applied to it."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"the model is {a_kind(model)}, not an nn.Module", remedy="wrap a function in an nn.Module")
    if isinstance(args, torch.Tensor | str | Mapping) or not isinstance(args, Sequence):
        raise OptionError(
            f"the arguments are {a_kind(args)}", remedy="pass a tuple, for one tensor (x,), and keyword arguments as example_kwargs={...}"
        )
    for name, module in model.named_modules():
        if getattr(vars(module).get("forward"), "sharded", False):
            what = f"{name or 'the module'} is parallelized already, so that it cannot be planned or parallelized again"
            raise RunError(what, remedy="plan the model before parallelize; for other options build it anew and move weights by state_dict")
        if getattr(vars(module).get("forward"), "waits", False):
            what = f"{name or 'the module'} waits for its first call, at which parallelize_module plans for it"
            raise RunError(what, remedy="plan before parallelize_module, or parallelize the whole model, whose program takes its place")
        if isinstance(module, WRAPPERS) and not (fsdp2 and is_fully_sharded(module)):
            what = f"{name or 'the model'} is wrapped by FSDP or DDP ({type(module).__name__})"
            raise OptionError(what, remedy=OF_FULLY_SHARDED if is_fully_sharded(module) else OF_WRAPPED)


def joint_graph(
    module: fx.GraphModule, flat_args: Sequence[Any], train: bool, replacements: Mapping[Any, Any] | None = None, cache: bool = False
) -> fx.GraphModule:
    """The functional aten graph of a flat Dynamo graph after ``separate_outputs``; its inputs and outputs carry AOTAutograd's
    descriptors in ``meta["desc"]``."""
    flat_args, decompositions = _used(module, flat_args), planning_decompositions()

    def make() -> fx.GraphModule:
        with contextlib.ExitStack() as stack, _grad(train), kernels_captured(), transforms_ended(), Neutralise(replacements):
            exported = aot_export_joint_with_descriptors(stack, module, tuple(flat_args), decompositions=decompositions)
        return exported.graph_module

    return joint_cache.cached(make, module, flat_args, (train, bool(replacements)), decompositions) if cache else make()


def _used(module: fx.GraphModule, flat_args: Sequence[Any]) -> list[Any]:
    """The arguments, None for constants that Dynamo inlined in the graph: AOTAutograd does not accept all kinds of them."""
    ends = [n for n in module.graph.nodes if n.op == "placeholder"]
    return [a if isinstance(a, torch.Tensor) or node.users else None for node, a in zip(ends, flat_args, strict=True)]


def fresh(value: Any) -> Any:
    """A fake like a fake argument, for a run that may write to it."""
    return fake_tensor(value, value.fake_mode, train=False) if isinstance(value, FakeTensor) else value


def separate_outputs(module: fx.GraphModule, flat_args: Sequence[Any]) -> None:
    """Clones outputs that are views of an input, or of another output, so that each has a tangent of its own."""
    if returns_new_memory(module.graph):
        return
    probes = list(map(fresh, flat_args))
    values = probe(module, probes)
    held = {storage_key(t) for t in (*probes, *module.parameters(), *module.buffers()) if isinstance(t, torch.Tensor)}
    output = module.graph.output_node()
    leaves, spec = pytree.tree_flatten(output.args[0])
    with module.graph.inserting_before(output):
        for i, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if isinstance(leaf, fx.Node) and isinstance(value, torch.Tensor):
                if storage_key(value) in held:
                    leaves[i] = module.graph.call_method("clone", (leaf,))
                    leaves[i].meta = {k: v for k, v in leaf.meta.items() if k == "stack_trace"}
                held.add(storage_key(value))
    output.args = (pytree.tree_unflatten(leaves, spec),)
    module.recompile()


def planning_graph(
    joint: fx.GraphModule,
    names: Mapping[str, str],
    paths: Sequence[str],
    in_spec: pytree.TreeSpec,
    out_spec: pytree.TreeSpec,
    train: bool,
    aliases: dict[str, str],
    meshes: Mapping[str, OnMesh] | None = None,
) -> PlanningGraph:
    """Names the inputs and outputs of a joint graph: ``names`` maps its parameter and buffer targets to FQNs, ``paths`` name the inputs.

    ``meshes``: the parameters and inputs that are DTensors, by name.
    """
    fold_sizes(joint)
    drop_tokens(joint)
    drop_wrong_bounds(joint)
    replace_constants(joint)
    replace_as_strided(joint)
    _tidy(joint)
    use_known_masks(joint)
    _refuse_sparse(joint, train)
    replace_kernel_calls(joint)
    check_draws(joint)
    numbers = tensors_of_numbers(joint)
    keep_numbers_in_tensors(joint)
    outputs, fixed = _name_outputs(joint, names, paths)
    _merge_seeds(joint)
    number_draws(joint)
    inputs = _name_inputs(joint, names, paths)
    forms = named_layouts(joint, inputs, outputs, meshes or {})
    returned = values_of_modules(joint)
    joint.graph.lint()
    joint.recompile()
    return PlanningGraph(
        joint, inputs, outputs, in_spec, with_fixed(out_spec, fixed, numbers), train, aliases, returned=returned, forms=forms
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers -> the first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for items in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in items:
            if id(value) in first:
                aliases[name] = first[id(value)]
            else:
                first[id(value)] = name
    return aliases


def _tidy(joint: fx.GraphModule) -> None:
    """Removes detaches and aliases, which compute nothing, and dead code."""
    for node in list(joint.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    drop_unused_returns(joint)
    joint.graph.eliminate_dead_code()
    _views_to_reshapes(joint)


def _refuse_sparse(joint: fx.GraphModule, train: bool) -> None:
    """Raises TraceError for a sparse tensor that is an input or in training: AOTAutograd silently drops gradients through it."""
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided and (train or node.op == "placeholder"):
            raise TraceError(
                f"{node.name} ({node.target}) is a sparse tensor ({value.layout})",
                where=source_line(node) or node.name,
                remedy="pass dense tensors, and train without sparse ones",
            )


def _views_to_reshapes(joint: fx.GraphModule) -> None:
    """Turns views of values computed from non-contiguous inputs into reshapes: shards are contiguous, so a view might be invalid."""
    strided: set[fx.Node] = set()
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and not value.is_contiguous():
            strided.add(node)
        elif any(n in strided for n in node.all_input_nodes):
            strided.add(node)
            if node.target is aten.view.default:
                node.target = aten.reshape.default


def _merge_seeds(joint: fx.GraphModule) -> None:
    """Replaces all ``rng_seed`` nodes by one input."""
    seeds = [n for n in joint.graph.nodes if n.target is torch.ops.fxshard.rng_seed.default]
    if not seeds:
        return
    last = [n for n in joint.graph.nodes if n.op == "placeholder"][-1:]
    with joint.graph.inserting_after(last[0]) if last else joint.graph.inserting_before(next(iter(joint.graph.nodes))):
        seed = joint.graph.placeholder("rng_seed")
    seed.meta["val"] = seeds[0].meta["val"]
    for node in seeds:
        node.replace_all_uses_with(seed)
        joint.graph.erase_node(node)


def _name_inputs(joint: fx.GraphModule, names: Mapping[str, str], paths: Sequence[str]) -> tuple[GraphInput, ...]:
    inputs, taken = [], {n.name for n in joint.graph.nodes}
    for node in [n for n in joint.graph.nodes if n.op == "placeholder"]:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            if node.users:
                raise TraceError(
                    f"input {node.name} is not a tensor and could not be made a constant", remedy="pass plain Python numbers or tensors"
                )
            joint.graph.erase_node(node)
            taken.discard(node.name)
            continue
        kind, name = _input_of(node.meta.get("desc"), names, paths)
        _rename(node, name if kind in ("parameter", "buffer", "input") else node.name, taken)
        inputs.append(GraphInput(node.name, kind, name))
    return tuple(inputs)


def _input_of(desc: Any, names: Mapping[str, str], paths: Sequence[str]) -> tuple[str, str]:
    if isinstance(desc, ParamAOTInput):
        return "parameter", names.get(desc.target, desc.target)
    if isinstance(desc, BufferAOTInput):
        return "buffer", names.get(desc.target, desc.target)
    if isinstance(desc, PlainAOTInput):
        return "input", paths[desc.idx]
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, InputMutationAOTOutput):
        kind, name = _input_of(desc.output.mutated_input, names, paths)
        remedy = "change a copy of it (x = x + 1 rather than x += 1), or detach it first"
        if kind == "parameter":
            remedy = "change it between calls: in the forward this is refused, also under .data and no_grad"
        raise TraceError(f"{name} is changed in place and needs a gradient", remedy=remedy)
    if isinstance(desc, TangentAOTInput):
        return "tangent", f"tangents[{desc.output.idx}]"
    if desc is None:
        return "seed", "rng_seed"
    raise TraceError(f"the traced graph has an input of a kind that is not supported: {desc}", remedy="pass plain tensors")


def _name_outputs(joint: fx.GraphModule, names: Mapping[str, str], paths: Sequence[str]) -> tuple[tuple[GraphOutput, ...], dict[int, Any]]:
    """Names the outputs and drops the None entries of inputs without gradient. Returns (outputs, constant outputs by index)."""
    node = joint.graph.output_node()
    shapes = {n.meta["desc"]: n.meta["val"].shape for n in joint.graph.nodes if n.op == "placeholder" and is_tensor(n)}
    kept, outputs, fixed = [], [], {}
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):
        if isinstance(desc, PlainAOTOutput) and not isinstance(value, fx.Node):
            if is_symbolic(value):
                what = f"the model returns a size that changes ({value}) as a number, or leaves it in an object"
                raise TraceError(what, remedy=RETURNED_SIZE)
            fixed[desc.idx] = value
            continue
        if isinstance(desc, PlainAOTOutput):
            outputs.append(GraphOutput("output", f"outputs[{desc.idx}]"))
        elif isinstance(desc, GradAOTOutput) and value is not None:
            outputs.append(GraphOutput("gradient", _input_of(desc.grad_of, names, paths)[1]))
        elif isinstance(desc, InputMutationAOTOutput):
            kind, name = _input_of(desc.mutated_input, names, paths)
            if value.meta["val"].shape != shapes[desc.mutated_input]:
                raise TraceError(f"{kind} {name} gets another shape", where=source_line(value), remedy="give a copy of it another shape")
            outputs.append(GraphOutput("mutation", name))
        elif value is None:
            continue
        else:
            raise TraceError(
                f"the traced graph has an output of a kind that is not supported: {desc}", remedy="return plain tensors from the model"
            )
        kept.append(value)
    node.args = (tuple(kept),)
    return tuple(outputs), fixed


def _rename(node: fx.Node, name: str, taken: set[str]) -> None:
    """Renames a node after the user's name: ``layers.0.wq.weight`` -> ``layers_0_wq_weight``, ``input`` -> ``input_1``, because graphs may
    not use the names of Python's built-in functions. ``taken``: the names of all nodes."""
    taken.discard(node.name)
    clean = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower() or "value"
    clean = f"_{clean}" if clean[0].isdigit() else f"{clean}_1" if is_reserved(clean) else clean
    unique, count = clean, 0
    while unique in taken:
        count += 1
        unique = f"{clean}__{count}"
    taken.add(unique)
    node.name = unique
    node.target = unique


def _grad(train: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.enable_grad() if train else torch.no_grad()


@contextlib.contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Disables the fused inference kernels of nn.MultiheadAttention and nn.TransformerEncoderLayer, which replace their operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
