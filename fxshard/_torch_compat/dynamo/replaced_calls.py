"""Private names of Dynamo (torch 2.13, 2.15): call Python functions in place of functions of torch in the code that it captures.

What would replace them: ``torch.compiler.substitute_in_graph`` for functions and methods of torch, not of Python alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fxshard._torch_compat.patched import patched


@contextlib.contextmanager
def captured_instead(
    functions: Mapping[Any, Callable[..., Any]],
    methods: Mapping[str, Callable[..., Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """While Dynamo captures: calls of these functions of torch are replaced by calls of Python functions, which Dynamo traces.

    ``methods``: functions that ``torch.Tensor`` gets as methods meanwhile, by names that it lacks. ``attributes``: what parameters,
    and tensors of subclasses, answer for such names.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import torch as torch_functions
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

    def instead(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return SourcelessBuilder.create(tx, functions[function]).call_function(tx, list(args), dict(kwargs))

    def of_kind(kind: Any) -> Callable[..., Any]:
        original = kind.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            value = self.fn if kind is UserFunctionVariable else self.value
            known = value.__hash__ is not None and value in (replaced if kind is UserFunctionVariable else functions)
            return instead(value, tx, args, kwargs) if known else original(self, tx, args, kwargs)

        return call_function

    method, added = TensorVariable.call_method, dict(methods or {})
    replaced = frozenset(functions)  # of those that Dynamo inlines: what replaces them is inlined too
    functions = {**functions, **{function: function for function in added.values()}}

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        function = getattr(torch.Tensor, name, None)
        return instead(function, tx, [self, *args], kwargs) if function in functions else method(self, tx, name, args, kwargs)

    overrides = torch_functions.has_torch_function

    def has_torch_function(value: Any) -> bool:
        """False within ``Tensor.__torch_function__``, as it is eagerly: torch's own Python functions (``F.rms_norm``, ``F.pad``) ask."""
        return InstructionTranslator.current_tx().symbolic_torch_function_state.torch_function_subclass_enabled and overrides(value)

    of_attributes = "var_getattr" if hasattr(TensorWithTFOverrideVariable, "var_getattr") else "tp_getattro_impl"  # the latter from 2.15 on
    attribute, plain_attribute = getattr(TensorWithTFOverrideVariable, of_attributes), getattr(TensorVariable, of_attributes)
    answers = dict(attributes or {})

    def of_plain(self: Any, tx: Any, name: str) -> Any:
        is_parameter = name in answers and issubclass(self.python_type(), torch.nn.Parameter)
        return VariableTracker.build(tx, answers[name]) if is_parameter else plain_attribute(self, tx, name)

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        """Methods of ``Tensor`` that torch writes in Python (``split``, ``norm``, ``unflatten``) are called as the others are."""
        if name in answers:
            return VariableTracker.build(tx, answers[name])
        inherited = inspect.getattr_static(self.class_type, name, None)
        written = inspect.isfunction(inherited) and inherited is getattr(torch.Tensor, name, None)
        return GetAttrVariable(self, name) if written else attribute(self, tx, name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(TensorWithTFOverrideVariable, of_attributes, var_getattr))
        stack.enter_context(patched(TensorVariable, of_attributes, of_plain))
        stack.enter_context(patched(torch_functions, "has_torch_function", has_torch_function))
        for kind in (TorchInGraphFunctionVariable, SkipFunctionVariable, UserFunctionVariable):
            stack.enter_context(patched(kind, "call_function", of_kind(kind)))
        stack.enter_context(patched(TensorVariable, "call_method", call_method))
        for name, function in added.items():
            setattr(torch.Tensor, name, function)
            stack.callback(delattr, torch.Tensor, name)
        yield
