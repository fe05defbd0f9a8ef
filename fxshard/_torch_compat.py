"""The only file that imports private names of torch (2.13): they move between releases, so they are kept together."""

from __future__ import annotations

from torch._C import _nn as c_nn
from torch._decomp import get_decompositions
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as capture_dynamo_graph
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
import torch.distributed._functional_collectives  # noqa: F401  (fake kernels of torch.ops._c10d_functional)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
    "c_nn",
    "capture_dynamo_graph",
    "get_decompositions",
    "pytree",
]
