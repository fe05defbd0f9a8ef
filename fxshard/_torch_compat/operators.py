"""Private names of torch (2.13): operators by name, their schemas, and torch's list of operators with example inputs.

What would replace them: ``torch.library`` listing operators and giving a schema; ``torch.testing`` with ``op_db``; a public
``scaled_mm`` overload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fxshard.errors import OptionError

flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ctc_loss_of_sequences = torch.ops.aten._ctc_loss.default
"""The loss of each sequence, with lengths as numbers."""
ctc_loss_of_tensors = torch.ops.aten._ctc_loss.Tensor
"""The same with lengths as tensors."""
assert_tensor_metadata = torch.ops.aten._assert_tensor_metadata.default
assert_async = torch.ops.aten._assert_async.msg
safe_softmax = torch.ops.aten._safe_softmax.default
"""A softmax whose rows of minus infinity are zero."""
scaled_mm_by_recipes = torch._scaled_mm_v2
"""The function behind ``torch.nn.functional.scaled_mm``."""


def schema_of(operator: Any) -> torch.FunctionSchema | None:
    """The schema of a torch operator; None for any other object."""
    return getattr(operator, "_schema", None)


def is_composite(operator: OpOverload) -> bool:
    """Whether torch computes it by other operators before a tensor subclass sees it."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


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


def operator_database() -> list[Any]:
    """torch's list of operators with example inputs; raises OptionError where its dependencies are not installed."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        what = f"torch's list of operators cannot be imported: {error}"
        raise OptionError(what, remedy="pip install 'fxshard[test]', which has what torch's own tests need") from error
    return list(op_db)
