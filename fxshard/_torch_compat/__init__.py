"""Private names of torch (2.13) are used only in this package, since they move between releases.

One mechanism per file; each says what it patches or reads, and which public API would replace it. Torch's own names are exported here.
"""

from __future__ import annotations

import torch

if getattr(torch.__spec__, "_initializing", False):  # TORCH_LOGS=+fxshard: torch lists our packages before it is ready
    raise ImportError("torch is being imported")

from torch._C import _nn as c_nn  # aten's functions behind torch.nn.functional

from fxshard._torch_compat.imports.quick_imports import quick_imports

with quick_imports():
    import torch.distributed._functional_collectives  # fake kernels of torch.ops._c10d_functional
    from torch._decomp import get_decompositions
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as capture_dynamo_graph
    from torch._functorch import aot_autograd  # noqa: F401  # for the files that use it
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from fxshard._torch_compat.dynamo.logs import one_handler

one_handler()

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "c_nn",
    "capture_dynamo_graph",
    "get_decompositions",
    "pytree",
]
