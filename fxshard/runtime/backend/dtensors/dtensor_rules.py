"""Gives DTensor fxshard's rules for operators that it lacks, so that Dynamo, which runs DTensor's propagation first, reaches the backend.

They hold for the whole process, in eager execution too, from the import of the backend on. Operators whose local form is not the operator
itself are replicated there. Left out: operators that DTensor knows, draw random numbers, or have results whose sizes depend on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import OpOverload, pytree
from fxshard._torch_compat.dtensor.rules import dtensor_has_rule, dtensor_operators, is_spec, keep_from_decomposing
from fxshard._torch_compat.dtensor.shards import handle_dtensors, handler_of, is_captured
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.operators import ctc_loss_of_sequences, flash_attention_on_cpu, is_composite, schema_of
from fxshard.errors import RuleError
from fxshard.graph.call import call_of
from fxshard.graph.planning_graph import outputs_of
from fxshard.mesh.mesh import Mesh
from fxshard.passes.trace.functions.decompose import planning_decompositions
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies.engine.engine import op_strategy
from fxshard.strategies.engine.registry import lookup, rule_names

UNSUITABLE = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
AS_ANY = (flash_attention_on_cpu, ctc_loss_of_sequences, torch.ops.aten.linalg_lstsq.default)
"""Tagged as random or with sizes that depend on data; but torch calls the first only without dropout, and the others' sizes are known."""
REPLICATED = (
    *("aten._chunk_cat.default", "aten._unsafe_masked_index.default", "aten._unsafe_masked_index_put_accumulate.default"),
    *("aten.linspace.Tensor_Tensor", "aten.linspace.Tensor_Scalar", "aten.linspace.Scalar_Tensor"),
    *("aten.logspace.Tensor_Tensor", "aten.logspace.Tensor_Scalar", "aten.logspace.Scalar_Tensor"),
    *("aten.linalg_lstsq.default", "aten.segment_reduce.default", "aten.hash_tensor.default", "aten._ctc_loss.default"),
    *("aten.histogram.bin_ct", "aten.histogram.bins_tensor", "aten.block_diag.default"),
    *("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.isin.Scalar_Tensor"),
    *("aten.as_strided_copy.default", "aten.as_strided_scatter.default", "aten.col2im.default", "aten.affine_grid_generator.default"),
    *("aten.diagonal_backward.default", "aten.unfold_backward.default"),
)
"""Operators that we replicate, of which DTensor has no decomposition, or one that fails."""
IN_PLACE = (
    *("aten.fill_.Tensor", "aten.addbmm_.default", "aten.renorm_.default"),
    *("aten.scatter_.reduce", "aten.scatter_.value_reduce", "aten.scatter_reduce_.two"),
)
"""Operators that torch refuses, and would decompose into operators that we register. They stay refused: in eager execution a view of
a sharded dim (``x[0]``) is a redistributed copy, and a write to it would be lost. (Dynamo cannot capture them on DTensors.)"""
EXTREMES = (torch.ops.aten.argmax.default, torch.ops.aten.argmin.default)
"""Operators that return an index along a dim, which may be sharded."""
Option = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the results and of the arguments, on one axis."""


def register_with_dtensor() -> None:
    for op in operators_without_rule():
        register_sharding(op)(DTensorRule(op))
    known = dtensor_operators()
    for op in EXTREMES:
        if (handler := handler_of(op)) is not None:
            handle_dtensors(op, partial(_extreme, handler))
    keep_from_decomposing({op for op in map(_operator, IN_PLACE) if op is not None and str(op) not in known}, _would_be_lost)


def _extreme(handler: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
    """``op`` by torch's ``handler``. While Dynamo captures a graph, on a tensor that is whole along the dim: along a sharded one, the
    handler adds this rank's offset to the indices, a number that Dynamo does not know, so that it would break the graph."""
    value, *rest = args
    if isinstance(value, DTensor) and is_captured(value):
        dim = rest[0] if rest else kwargs.get("dim")
        kept = [type(p) is Shard and dim is not None and p.dim != dim % value.ndim for p in value.placements]
        value = value.redistribute(placements=[p if keep else Replicate() for p, keep in zip(value.placements, kept, strict=True)])
    return handler(op, (value, *rest), kwargs)


def _would_be_lost(op: OpOverload) -> RuleError:
    remedy = "make the new value by the operator without underscore, or torch.where, or write to x.to_local()"
    return RuleError(f"{op} would be lost if it wrote to a view of a sharded dim, which is a copy in eager execution", remedy=remedy)


def operators_without_rule() -> Iterator[OpOverload]:
    """The operators that fxshard plans, by a rule or by a decomposition, and DTensor does not."""
    known = dtensor_operators()
    ruled = [_operator(name) for name in (*rule_names(), *REPLICATED) if name.startswith("aten.") and name not in known]
    for op in dict.fromkeys((*ruled, *(op for op in planning_decompositions() if str(op) not in known))):
        if op is None or (any(tag in op.tags for tag in UNSUITABLE) and op not in AS_ANY):
            continue
        decomposed = dtensor_has_rule(op) and str(op) not in REPLICATED  # by DTensor, which may shard what is replicated here
        if _is_suitable(op) and not (decomposed and not _may_shard(op)):
            yield op


def _may_shard(op: OpOverload) -> bool:
    """Whether a rule of ours shards the operator and runs it on shards as it is."""
    registered = lookup(str(op))
    return registered is not None and registered.local is None and registered.size_argument is None


def _operator(name: str) -> OpOverload | None:
    """``"aten.mm.default"`` as an operator, None if this torch lacks it."""
    _, packet, overload = name.split(".")
    found: OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    return found


def _is_suitable(op: OpOverload) -> bool:
    """Whether DTensor can be asked for it: an operator of torch that is not made of others, takes tensors, returns tensors (no lists of
    them), and writes to no argument."""
    schema = schema_of(op)
    assert schema is not None
    if op.namespace != "aten" or is_composite(op) or not any("Tensor" in str(a.type) for a in schema.arguments):
        return False
    tensors = all(str(one.type) == "Tensor" for one in schema.returns)
    return bool(schema.returns) and tensors and not schema.is_mutable


@dataclass(frozen=True)
class DTensorRule:
    """The sharding function of ``op`` for ``register_sharding``: from fxshard's rule, for the arguments of a call."""

    op: OpOverload
    is_of_fxshard = True

    def __call__(self, *args: Any, **kwargs: Any) -> list[Option]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        specs = [leaf for leaf in leaves if is_spec(leaf)]
        schema = schema_of(self.op)
        assert schema is not None
        whole: Option = [Replicate()] * len(schema.returns), [Replicate() if is_spec(leaf) else None for leaf in leaves]
        symbolic = any(isinstance(size, torch.SymInt) for spec in specs for size in spec.shape)
        if symbolic or not _may_shard(self.op):
            return [whole]
        node = _node(self.op, leaves, tree)
        if not isinstance(node.meta["val"], torch.Tensor | tuple) or len(outputs_of(node)) != len(schema.returns):
            return [whole]
        call, options = call_of(node), []
        for size in {max(2, ranks) for ranks in specs[0].mesh.shape}:  # DTensor asks for meshes of one rank on behalf of others
            options.append([_option(spec, leaves) for spec in op_strategy(call, Mesh({"axis": size})).specs])
        common = [option for option in options[0] if all(option in others for others in options[1:])]
        return [whole, *(option for option in common if option != whole)]


def _node(op: OpOverload, leaves: list[Any], tree: Any) -> fx.Node:
    """A call of ``op`` in a graph of its own, on fakes like the specs among ``leaves``."""
    graph = fx.Graph()
    with FakeTensorMode():
        nodes: list[Any] = []
        fakes: list[Any] = []
        for leaf in leaves:
            if is_spec(leaf):
                nodes.append(graph.placeholder(f"x{len(nodes)}"))
                fakes.append(torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.tensor_meta.dtype))
                nodes[-1].meta["val"] = fakes[-1]
            else:
                nodes.append(leaf)
                fakes.append(leaf)
        args, kwargs = pytree.tree_unflatten(fakes, tree)
        value = op(*args, **kwargs)
    node = graph.call_function(op, *pytree.tree_unflatten(nodes, tree))
    node.meta["val"] = value
    return node


def _option(spec: OpSpec, leaves: list[Any]) -> Option:
    inputs = iter(spec.inputs)
    return [layout[0] for layout in spec.outputs], [next(inputs)[0] if is_spec(leaf) else None for leaf in leaves]
