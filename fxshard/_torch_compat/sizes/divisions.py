"""Private names of torch (2.13): division of symbolic floats by zero, which raises in Python and gives inf or nan in C++.

What would replace it: SymFloats that divide as C++ does.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._decomp
import torch._refs
from torch.fx.experimental import proxy_tensor, sym_node
from torch.fx.experimental.sym_node import SymNode

from fxshard._torch_compat.sizes.expressions import divided

_OF_CPP = (sym_node.__file__, proxy_tensor.__file__, *(os.path.dirname(room.__file__) for room in (torch._decomp, torch._refs)))
"""Files and folders whose divisions follow C++: torch's forwarding code, and decompositions, which stand for kernels."""


@contextlib.contextmanager
def divisions_by_zero() -> Iterator[None]:
    """Within it, a float division in Python code adds a guard that the divisor is not zero, and raises ZeroDivisionError if the example's
    is. A division from C++ gives inf or nan instead: the gradient of ``std`` of one row divides by zero."""
    patched: list[tuple[Any, str, Any]] = [
        (torch.SymInt, "__truediv__", _of_python(torch.SymInt.__truediv__, reflected=False)),
        (torch.SymInt, "__rtruediv__", _of_python(torch.SymInt.__rtruediv__, reflected=True)),
        (torch.SymFloat, "__truediv__", _of_python(torch.SymFloat.__truediv__, reflected=False)),
        (torch.SymFloat, "__rtruediv__", _of_python(torch.SymFloat.__rtruediv__, reflected=True)),
        (SymNode, "_float_truediv", _of_any_hint(SymNode._float_truediv)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, made in patched:
        setattr(owner, name, made)
    try:
        yield
    finally:
        for owner, name, made in before:
            setattr(owner, name, made)


def _of_python(divide: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    @functools.wraps(divide)
    def checked(self: Any, other: Any) -> Any:
        floats = any(isinstance(value, (float, torch.SymFloat)) for value in (self, other))
        if floats and not sys._getframe(1).f_code.co_filename.startswith(_OF_CPP) and (self if reflected else other) == 0:
            raise ZeroDivisionError("float division by zero")
        return divide(self, other)

    return checked


def _of_any_hint(divide: Callable[[SymNode, SymNode], SymNode]) -> Callable[[SymNode, SymNode], SymNode]:
    @functools.wraps(divide)
    def made(self: SymNode, other: SymNode) -> SymNode:
        if other.hint is None or other.hint != 0 or self.hint is None:
            return divide(self, other)
        if proxy_tensor.get_proxy_mode() is not None:
            pair = (sym_node.wrap_node(self), sym_node.wrap_node(other))
            return sym_node.to_node(self, proxy_tensor.handle_sym_dispatch(operator.truediv, pair, {}))
        found = divide(self, SymNode(other.expr, other.shape_env, other.pytype, 1.0, fx_node=other.fx_node))
        found._hint = divided(self.hint, other.hint)
        return found

    return made
