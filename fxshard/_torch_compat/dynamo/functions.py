"""Private names of torch (2.13): capture of users' autograd functions (``torch.autograd.Function``).

Dynamo captures a function's forward and backward, but rejects some that eager torch runs. Here it accepts these too.

What would replace it: ``torch.compile``, once it captures these functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def all_functions() -> Iterator[None]:
    """While Dynamo captures, it also accepts functions that

    - mark a tensor as dirty and return the result of the in-place operation (``return x.mul_(2)``, the same tensor as another node);
    - mark a tensor as dirty where no gradient is needed, so that the mark has no effect;
    - return a single tensor, marked as not differentiable;
    - define a forward-mode derivative, which is not used;
    - call ``torch.autograd.grad`` in their backward, to recompute and differentiate their forward.
    """
    from torch._dynamo import config
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable as Applied
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable as Context
    from torch._dynamo.variables.misc import AutogradFunctionVariable as Function

    trace_forward, applied, method, apply = Applied.trace_forward_graph, Applied.call_function, Context.call_method, Function.call_apply

    def trace_forward_graph(self: Any, tx: Any, ctx: Any, *rest: Any) -> Any:
        found = trace_forward(self, tx, ctx, *rest)
        result = found[1]
        returned = [x for x in ([result] if result.is_tensor() else getattr(result, "items", ())) if x.is_tensor()]
        same = {id(_example(x)): x for x in returned}
        ctx.dirty_tensors = ctx.dirty_tensors and [same.get(id(_example(x)), x) for x in ctx.dirty_tensors]
        if result.is_tensor() and result.as_proxy() in (ctx.non_differentiable or ()):
            ctx.non_differentiable, self.without_gradient = None, True
        return found

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = applied(self, tx, args, kwargs)
        return result.call_method(tx, "detach", [], {}) if getattr(self, "without_gradient", False) else result

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "mark_dirty" and getattr(self, "proxy", None) is None:
            return ConstantVariable.create(None)
        return method(self, tx, name, args, kwargs)

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        with mock.patch.object(self.fn_cls, "jvp", torch.autograd.Function.jvp), config.patch(trace_autograd_ops=True):
            return apply(self, tx, args, kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Applied, "trace_forward_graph", trace_forward_graph))
        stack.enter_context(mock.patch.object(Applied, "call_function", call_function))
        stack.enter_context(mock.patch.object(Context, "call_method", call_method))
        stack.enter_context(mock.patch.object(Function, "call_apply", call_apply))
        yield


def _example(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]
