"""Private names of torch (2.13) are used only in this package, since they move between releases.

One mechanism per file; each says what it patches or reads, and which public API would replace it. What many files use is exported here.
"""

from __future__ import annotations

from torch._C import _nn as c_nn  # aten's functions behind torch.nn.functional

from fxshard._torch_compat.quick_imports import quick_imports

with quick_imports():
    import torch.distributed._functional_collectives  # noqa: F401  # fake kernels of torch.ops._c10d_functional
    from torch._decomp import get_decompositions
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as capture_dynamo_graph
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from fxshard._torch_compat.aot import (
        TOKEN_INPUTS,
        TOKEN_OUTPUTS,
        BufferAOTInput,
        GradAOTOutput,
        InputMutationAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        PlainAOTOutput,
        TangentAOTInput,
        aot_export_joint_with_descriptors,
    )

from fxshard._torch_compat.calls import own_tensors
from fxshard._torch_compat.dtensor.rules import (
    dtensor_has_rule,
    dtensor_spec,
    dtensor_takes,
    mesh_of_one,
    sharding_functions,
    wrap_like,
)
from fxshard._torch_compat.dynamo.capture import captured_out_spec, dynamo_frame, dynamo_source, sizes_from_data
from fxshard._torch_compat.dynamo.local_map import LocalMapCall, captured_local_maps
from fxshard._torch_compat.dynamo.replaced_calls import captured_instead
from fxshard._torch_compat.dynamo.side_effects import noted_side_effects
from fxshard._torch_compat.fakes import FAKE_ERRORS, FakeTensor, FakeTensorMode, changes_of, forget_inner_sizes, quiet_fakes, storage_key
from fxshard._torch_compat.flex_attention import flex_attention_in_plain_operators, flex_attention_of_any_device, is_flex_attention
from fxshard._torch_compat.groups import FAKE_STORE, register_group_alias
from fxshard._torch_compat.nodes import lazy_graph_module, name_of_call
from fxshard._torch_compat.operators import (
    find_operator,
    named_arguments,
    operator_database,
    operator_names,
    scaled_mm_by_recipes,
    schema_of,
)

__all__ = [
    "FAKE_ERRORS",
    "FAKE_STORE",
    "TOKEN_INPUTS",
    "TOKEN_OUTPUTS",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "LocalMapCall",
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
    "dtensor_has_rule",
    "dtensor_spec",
    "dtensor_takes",
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
    "name_of_call",
    "named_arguments",
    "noted_side_effects",
    "operator_database",
    "operator_names",
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
