"""Private names of DTensor (torch 2.13): its rules, specs and dispatcher.

What would replace them: a query whether DTensor shards an operator, and how; a list of what ``register_sharding`` was given; a
DeviceMesh without a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def wrap_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor with the mesh, placements and global shape of ``like``, without checks and autograd."""
    from torch.distributed.tensor import DTensor

    return torch.Tensor._dtensor__new__(DTensor, local, like._spec, requires_grad=False)  # skips __init__, which is empty but has a frame


def dtensor_has_rule(op: OpOverload) -> bool:
    """Whether DTensor itself can shard ``op``: by a rule, a strategy, a custom handler or a decomposition."""
    from torch.distributed.tensor import DTensor

    return op in _own_operators() or DTensor._op_dispatcher.sharding_propagator.decomp_strategy.has_decomp(op)


def dtensor_operators() -> frozenset[str]:
    """The operators for which DTensor has a rule, a strategy or a handler of its own (``"aten.mm.default"``)."""
    return frozenset(map(str, _own_operators()))


def _own_operators() -> set[Any]:
    """These operators, without those for which fxshard gave DTensor its rules."""
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    known = dispatcher.sharding_propagator
    given = {op for op, f in known.op_strategy_funcs.items() if isinstance(f, functools.partial) and f.args and _is_of_fxshard(f.args[0])}
    tables = (known.op_to_rules, known.op_strategy_funcs, known.op_single_dim_strategy_funcs, dispatcher._custom_op_handlers)
    return set().union(*tables, dispatcher._random_ops) - given


def _is_of_fxshard(function: Any) -> bool:
    return getattr(function, "is_of_fxshard", False)


def keep_from_decomposing(operators: Collection[OpOverload], reason: Callable[[OpOverload], Exception]) -> None:
    """Keeps DTensor from decomposing ``operators``: it says that it has no strategy, because of ``reason(op)``."""
    from torch.distributed.tensor import DTensor

    decomposing = DTensor._op_dispatcher.sharding_propagator.decomp_strategy
    by_torch = decomposing.propagate_strategy

    def propagate_strategy(op_schema: Any) -> Any:
        if op_schema.op in operators:
            raise reason(op_schema.op)
        return by_torch(op_schema)

    decomposing.propagate_strategy = propagate_strategy


def is_spec(value: Any) -> bool:
    """Whether an argument of a sharding function stands for a tensor: it has ``shape``, ``stride``, ``mesh`` and ``tensor_meta``."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return isinstance(value, DTensorSpec)


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


def dtensor_spec(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The DTensorSpec that a sharding function receives: this shape and dtype, replicated on a mesh of one rank."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as SpecMeta

    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensorSpec(mesh_of_one(("axis",)), (Replicate(),), SpecMeta(torch.Size(shape), strides, dtype))


def sharding_functions() -> dict[str, Callable[..., Any]]:
    """The functions that users gave to ``register_sharding``, by operator (``"mylib.op.default"``), without torch's own strategies
    and those that fxshard itself gave to DTensor (they have ``is_of_fxshard``)."""
    from torch.distributed.tensor import DTensor

    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    made = {op: f for op, f in known.items() if isinstance(f, functools.partial) and f.func.__qualname__.startswith("register_sharding.")}
    return {str(op): f.args[0] for op, f in made.items() if not _is_of_fxshard(f.args[0])}


def mesh_of_one(axis_names: Sequence[str]) -> DeviceMesh:
    """A DeviceMesh whose only rank is this process, without a process group."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.zeros((1,) * len(axis_names), dtype=torch.int64)
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axis_names), _init_backend=False, _rank=0)
