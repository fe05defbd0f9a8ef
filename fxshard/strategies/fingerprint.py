"""Functions as text that is the same in every process for the same code, and another for other code: ranks compare it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from fxshard._torch_compat import schema_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, range, slice)


def fingerprint(function: Any) -> str:
    """12 hex digits over what the function does: its code, its defaults, and what it closes over as far as that is plain.

    No address, file or line goes in. Another version of Python compiles to other code, which is told apart too.
    """
    return hashlib.sha256(repr(_described(function, ())).encode()).hexdigest()[:12]


def _described(value: Any, above: tuple[int, ...]) -> Any:
    """``value`` as nested tuples of texts; ``above``: what is being described, which a recursive function closes over."""
    if id(value) in above:
        return "itself"
    inner = functools.partial(_described, above=(*above, id(value)))
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(inner, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, tuple(sorted(map(repr, map(inner, value))))
    if isinstance(value, dict):
        return "dict", tuple(sorted((repr(inner(k)), repr(inner(v))) for k, v in value.items()))
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_argcount, value.co_kwonlyargcount, value.co_flags
        return "code", value.co_code.hex(), value.co_exceptiontable.hex(), names, inner(value.co_consts)
    if isinstance(value, FunctionType):
        cells = tuple(_content(cell, inner) for cell in value.__closure__ or ())
        return "function", inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__), cells
    if isinstance(value, MethodType):
        return "method", inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return "partial", inner(value.func), inner(value.args), inner(value.keywords)
    return _named(value, inner)


def _content(cell: Any, inner: Any) -> Any:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # what the function closes over has no value yet
        return "empty"


def _named(value: Any, inner: Any) -> Any:
    """Modules, classes, operators and what is built in by name; an object that can be called by its class's code and its own fields."""
    if isinstance(value, (type, ModuleType)) or not hasattr(type(value), "__dict__"):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if schema_of(value) is not None:
        return "operator", str(value)
    kind, name = type(value), getattr(value, "__qualname__", "")
    call = inspect.getattr_static(kind, "__call__", None)
    own = (inner(call), inner(vars(value))) if isinstance(call, FunctionType) and hasattr(value, "__dict__") else ()
    return kind.__module__, kind.__qualname__, name, own
