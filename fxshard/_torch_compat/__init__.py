"""Private names of torch (2.13) are used only in this package, since they move between releases."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch_compat.quick_imports import quick_imports
from fxshard.errors import OptionError

with quick_imports():
    import torch.distributed._functional_collectives  # fake kernels of torch.ops._c10d_functional
    from torch._C import _nn as c_nn
    from torch._decomp import get_decompositions
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as capture_dynamo_graph
    from torch._functorch._aot_autograd.descriptors import (
        BackwardTokenAOTInput,
        BackwardTokenAOTOutput,
        BufferAOTInput,
        ForwardTokenAOTInput,
        ForwardTokenAOTOutput,
        GradAOTOutput,
        InputMutationAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        PlainAOTOutput,
        TangentAOTInput,
    )
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import fx
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors that fake tensors raise where a tensor with data would work."""

scaled_mm_by_recipes = torch._scaled_mm_v2
"""The function behind ``torch.nn.functional.scaled_mm``."""

FAKE_STORE = "torch.testing._internal.distributed.fake_pg.FakeStore()"
TOKEN_INPUTS = (ForwardTokenAOTInput, BackwardTokenAOTInput)
TOKEN_OUTPUTS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)
"""Inputs and outputs of a traced graph that only order operators with side effects."""


def register_group_alias(name: str, group: ProcessGroup) -> None:
    """Lets functional collectives find ``group`` under ``name`` as well."""
    from torch._C._distributed_c10d import _register_process_group

    _register_process_group(name, group)


def lazy_graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule that generates its Python code only when called, since interpreters never need it."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), graph)


def name_of_call(target: Any) -> str:
    """The default base of a node's name for a call of ``target``."""
    return re.sub("[^0-9a-zA-Z_]+", "_", torch.fx.Graph()._target_to_str(target))


def wrap_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor with the mesh, placements and global shape of ``like``, without checks and autograd."""
    from torch.distributed.tensor import DTensor

    return torch.Tensor._dtensor__new__(DTensor, local, like._spec, requires_grad=False)  # skips __init__, which is empty but has a frame


def dtensor_has_rule(op: OpOverload) -> bool:
    """Whether DTensor can shard ``op``: by a rule, a strategy, a custom handler or a decomposition."""
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    known = dispatcher.sharding_propagator
    tables = (known.op_to_rules, known.op_strategy_funcs, known.op_single_dim_strategy_funcs, dispatcher._custom_op_handlers)
    return any(op in table for table in tables) or op in dispatcher._random_ops or known.decomp_strategy.has_decomp(op)


def dtensor_takes(
    op: OpOverload, args: Any, kwargs: Any, metas: Sequence[tuple[Sequence[int], torch.dtype]], placements: Sequence[Any], mesh: DeviceMesh
) -> bool:
    """Whether DTensor runs ``op`` on operands in these placements without redistributing one first.

    In ``args`` and ``kwargs`` each tensor is replaced by a callable that picks its spec from the list of operands' specs.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import OpSchema

    specs = [replaced_spec(dtensor_spec(*meta), mesh, placement) for meta, placement in zip(metas, placements, strict=True)]
    given, named = pytree.tree_map(lambda a: a(specs) if callable(a) and not isinstance(a, type) else a, (tuple(args), dict(kwargs)))
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(op, tuple(given), named, schema_info=propagator.op_to_schema_info.get(op))
    try:
        return not propagator.propagate_op_sharding_non_cached(schema).needs_redistribute
    except Exception:
        return False


def replaced_spec(spec: Any, mesh: DeviceMesh, placement: Any) -> Any:
    """The DTensorSpec on another mesh, of one axis, with another placement."""
    return type(spec)(mesh, (placement,), spec.tensor_meta)


def storage_key(value: torch.Tensor) -> int:
    """A key that is equal for tensors that share storage, fake ones too, as long as one of them is alive."""
    return value.untyped_storage()._cdata


def dynamo_source(placeholder: fx.Node) -> tuple[str, bool]:
    """(the source of the value in Dynamo, as an expression; whether it is a number passed as a tensor)."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    return (source.name if source is not None else ""), bool(getattr(argument, "pass_arg_as_tensor", False))


def dynamo_frame() -> tuple[str, tuple[str, ...]]:
    """The name of the function that Dynamo is compiling and its variables, arguments first; empty outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return "", ()
    return code.co_name, code.co_varnames


@contextlib.contextmanager
def noted_side_effects() -> Iterator[list[str]]:
    """While Dynamo captures: yields a list that receives, at the end, the sources of the Python objects that the code changes."""
    from torch._dynamo import config

    found: list[str] = []
    try:
        with config.patch(side_effect_replay_policy="warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        for one in caught:
            text = str(one.message)
            if "side effects happened in the model.forward" in text:
                found += re.findall(r"""["']([LG]\[.*?)["'](?:, |\]$)""", text)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def sizes_from_data() -> contextlib.AbstractContextManager[Any]:
    """While Dynamo captures: operators whose output sizes or numbers depend on data stay in the graph, as symbols.

    Calls of ``warnings.warn`` are left out of the graph.
    """
    from torch._dynamo import config

    return config.patch(
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        ignore_logging_functions={*config.ignore_logging_functions, warnings.warn},
    )


def forget_inner_sizes(operands: Any, result: Any) -> None:
    """Drop unbacked symbols that were created inside a call captured as one node and are not in its result: they need no node."""
    mode = next((t.fake_mode for t in pytree.tree_leaves(operands) if isinstance(t, FakeTensor)), None)
    env = None if mode is None else mode.shape_env
    if env is not None:
        kept = set().union(*map(free_unbacked_symbols, pytree.tree_leaves(result)))
        env.pending_fresh_unbacked_symbols[:] = [s for s in env.pending_fresh_unbacked_symbols if s in kept]


@dataclass(frozen=True)
class LocalMapCall:
    """A call of a function made by ``local_map``: its placements (None where not given), its mesh, the shapes of its arguments (None: no
    tensor), and its call stack: (file, line, code), innermost last. ``spmd_types``: whether it asks for torch's check of types (2.14)."""

    outputs: Any
    inputs: Any
    gradients: Any
    device_mesh: Any
    spmd_types: bool
    shapes: tuple[tuple[int, ...] | None, ...]
    frames: tuple[tuple[str, int | None, str | None], ...]


@contextlib.contextmanager
def captured_local_maps(describe: Callable[[LocalMapCall], tuple[Any, Any]], region: Callable[..., Any]) -> Iterator[None]:
    """While Dynamo captures: a call of a ``local_map`` function becomes ``region(function, begins, ends, *args, **kwargs)``.

    ``describe`` returns the constants ``begins`` and ``ends`` for a call.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable as Wrapped
    from torch._guards import TracingContext

    def call(_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        names = _names_before_user_arguments(sys.modules[home]._local_map_wrapped)
        function, *given = (a.realize() if hasattr(a, "realize") else a for a in args)
        options, passed = given[: len(names) - 1], given[len(names) - 1 :]
        outputs, inputs, gradients, device_mesh = (v.as_python_constant() for v in options[:4])
        checked = any(v.as_python_constant() for name, v in zip(names[1:], options, strict=True) if "spmd_types" in name)
        shapes = tuple(tuple(v.as_proxy().node.meta["example_value"].shape) if v.is_tensor() else None for v in passed)
        frames = tuple((f.filename, f.lineno, f.line) for f in TracingContext.extract_stack())
        begins, ends = describe(LocalMapCall(outputs, inputs, gradients, device_mesh, checked, shapes, frames))
        constants = [SourcelessBuilder.create(tx, value) for value in (begins, ends)]
        inner = SourcelessBuilder.create(tx, region)
        return inner.call_function(tx, [function, *constants, *passed], dict(kwargs))

    asked, home = Wrapped.should_wrap_in_hop, "torch.distributed.tensor.experimental._func_map"
    known = staticmethod(lambda value: home in sys.modules and asked(value))  # without the import there are no such functions
    with _patched(Wrapped, "_call_function", call), _patched(Wrapped, "should_wrap_in_hop", known), Wrapped.enable():
        yield


def _names_before_user_arguments(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that stand before its ``*args``."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


@contextlib.contextmanager
def captured_instead(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While Dynamo captures: calls of these functions of torch are replaced by calls of Python functions, which Dynamo traces."""
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.functions import SkipFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def instead(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return SourcelessBuilder.create(tx, functions[function]).call_function(tx, list(args), dict(kwargs))

    def of_kind(kind: Any) -> Callable[..., Any]:
        original = kind.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            known = self.value.__hash__ is not None and self.value in functions
            return instead(self.value, tx, args, kwargs) if known else original(self, tx, args, kwargs)

        return call_function

    method = TensorVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        function = getattr(torch.Tensor, name, None)
        return instead(function, tx, [self, *args], kwargs) if function in functions else method(self, tx, name, args, kwargs)

    with contextlib.ExitStack() as stack:
        for kind in (TorchInGraphFunctionVariable, SkipFunctionVariable):
            stack.enter_context(_patched(kind, "call_function", of_kind(kind)))
        stack.enter_context(_patched(TensorVariable, "call_method", call_method))
        yield


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # from vars: a descriptor as stored, not bound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def flex_attention_of_any_device() -> contextlib.AbstractContextManager[None]:
    """While Dynamo captures: allow training with flex_attention on the CPU, where models are traced; its kernels never run there."""
    from torch.nn.attention import flex_attention as module

    return _patched(module, "_validate_device", lambda query, key, value: None)


def is_flex_attention(target: Any) -> bool:
    """Whether a node of a captured graph calls ``flex_attention``: (q, k, v, score_mod, block mask, scale, options, buffers, buffers)."""
    return target is torch.ops.higher_order.flex_attention


def flex_attention_in_plain_operators() -> Callable[..., Any]:
    """torch's reference implementation, with the same arguments; of the block mask it reads only the last entry, the function."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Suppress the traceback that torch logs when an operator rejects its operands, since the error is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def schema_of(operator: Any) -> torch.FunctionSchema | None:
    """The schema of a torch operator; None for any other object."""
    return getattr(operator, "_schema", None)


def named_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a call of ``operator`` by name, with defaults for omitted ones."""
    known = operator._schema.arguments
    defaults = {a.name: a.default_value for a in known if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in known), args, strict=False)), **(kwargs or {})}


def find_operator(op: Any) -> OpOverload | None:
    """An operator overload from its name (``"mylib::op"``: the default one), a packet, a custom op or the overload itself."""
    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverloadPacket

    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        name, _, overload = op.partition(".")
        if f"{name}.{overload}".removesuffix(".default").removesuffix(".") not in operator_names():
            return None
        space, _, plain = name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), plain), overload or "default", None)
    if isinstance(op, OpOverloadPacket):
        return getattr(op, "default", None)
    return op if isinstance(op, OpOverload) else None


def operator_names() -> frozenset[str]:
    """All operators registered in this process: ``mylib::op``, ``mylib::op.overload``."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def sharding_functions() -> dict[str, Callable[..., Any]]:
    """The functions that users gave to ``register_sharding``, by operator (``"mylib.op.default"``), without torch's own strategies."""
    from torch.distributed.tensor import DTensor

    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    made = {op: f for op, f in known.items() if isinstance(f, functools.partial) and f.func.__qualname__.startswith("register_sharding.")}
    return {str(op): f.args[0] for op, f in made.items()}


def dtensor_spec(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The DTensorSpec that a sharding function receives: this shape and dtype, replicated on a mesh of one rank."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as SpecMeta

    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensorSpec(mesh_of_one(("axis",)), (Replicate(),), SpecMeta(torch.Size(shape), strides, dtype))


def changes_of(value: torch.Tensor) -> int:
    """A tensor's version: the number of in-place writes."""
    return value._version


def own_tensors(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Parameters and buffers of ``module`` itself, without submodules; tied ones are repeated."""
    return [*module._parameters.values(), *module._buffers.values()]


def captured_out_spec(captured: fx.GraphModule) -> pytree.TreeSpec:
    """The structure of the return value of a module captured by Dynamo."""
    return captured.graph._codegen.pytree_info.out_spec


def operator_database() -> list[Any]:
    """torch's list of operators with example inputs; raises OptionError where its dependencies are not installed."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        what = f"torch's list of operators cannot be imported: {error}"
        raise OptionError(what, remedy="pip install 'fxshard[test]', which has what torch's own tests need") from error
    return list(op_db)


def mesh_of_one(axis_names: Sequence[str]) -> DeviceMesh:
    """A DeviceMesh whose only rank is this process, without a process group."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.zeros((1,) * len(axis_names), dtype=torch.int64)
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axis_names), _init_backend=False, _rank=0)


__all__ = [
    "FAKE_ERRORS",
    "TOKEN_INPUTS",
    "TOKEN_OUTPUTS",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "LocalMapCall",
    "HigherOrderOperator",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "aot_export_joint_with_descriptors",
    "c_nn",
    "capture_dynamo_graph",
    "captured_instead",
    "captured_local_maps",
    "captured_out_spec",
    "changes_of",
    "dtensor_spec",
    "dtensor_has_rule",
    "dynamo_frame",
    "dynamo_source",
    "find_operator",
    "flex_attention_in_plain_operators",
    "flex_attention_of_any_device",
    "forget_inner_sizes",
    "get_decompositions",
    "is_flex_attention",
    "lazy_graph_module",
    "mesh_of_one",
    "noted_side_effects",
    "operator_names",
    "operator_database",
    "own_tensors",
    "pytree",
    "quiet_fakes",
    "register_group_alias",
    "scaled_mm_by_recipes",
    "schema_of",
    "sharding_functions",
    "sizes_from_data",
    "storage_key",
    "wrap_like",
]
