"""Private names of torch (2.13): mark the outputs of modules in a graph that Dynamo captures.

What would replace it: ``nn_module_stack`` in node metadata with each call of a module told apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxshard._torch_compat.dynamo.transforms import in_transform

CHECKPOINTS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.wrap_activation_checkpoint)
"""Operators with a subgraph that tracing the whole model inlines."""


@contextlib.contextmanager
def returned_by_modules(mark: Any, names: Mapping[int, str]) -> Iterator[None]:
    """Within it, each call of a module is followed by ``mark(tensors, name)`` in the captured graph, with its output tensors in order.

    ``names``: names of modules by their ids; other modules are not marked, nor are calls within a transform of ``torch.func``, whose
    values have dims of their own.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Called

    original = Called.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = original(self, tx, args, kwargs)
        name = names.get(id(self.value))
        if name is not None and _is_in_the_whole(tx.output) and not in_transform():
            found: dict[Any, Any] = {}
            VariableTracker.visit(lambda v: found.update(_tensor(v)), result, side_effects=tx.output.side_effects)
            if found:
                tx.output.create_proxy("call_function", mark, (list(found.values()), name), {})
        return result

    Called.call_function = call_function
    try:
        yield
    finally:
        Called.call_function = original


def _tensor(variable: Any) -> dict[Any, Any]:
    """{node: proxy} of a variable that is a tensor, else {}; realises lazy variables of tensors."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    if isinstance(variable, LazyVariableTracker) and not variable.is_realized() and issubclass(variable.peek_type(), torch.Tensor):
        variable = variable.realize()
    if not isinstance(variable, TensorVariable):
        return {}
    proxy = variable.as_proxy()
    return {proxy.node: proxy}


def _is_in_the_whole(output: Any) -> bool:
    """Whether Dynamo is tracing the main graph, not a subgraph of a loop, branch or other higher-order operator."""
    tracer = output.current_tracer
    while tracer is not output.root_tracer and tracer.source_target in CHECKPOINTS:
        tracer = tracer.parent
    return tracer is output.root_tracer
