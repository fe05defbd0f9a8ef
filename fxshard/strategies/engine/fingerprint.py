"""Fingerprints of functions: equal in every process for equal code, different for different code, so that ranks can compare them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.operators import schema_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, range, slice)
SHIPPED = {"torch", "fxshard", *sys.stdlib_module_names}
INSTALLED = {"site-packages", "dist-packages"}
"""Versioned packages, and folders of such packages: the globals of their functions are not followed."""

Named = dict[tuple[str, int], Any]
"""Global values that code refers to, by name and ``id``."""


def fingerprint(function: Any) -> str:
    """12 hex digits of a hash over the function's code, defaults, closure and the globals that it refers to, followed through functions.

    Independent of addresses, files and lines. Differs between versions of Python, which compile to different bytecode.
    """
    named: Named = {}
    said = repr(_described(function, named, ()))
    to_do, helpers = list(named), set()
    while to_do:
        key = to_do.pop()
        found: Named = {}
        helpers.add(repr((key[0], _described(named[key], found, ()))))
        to_do += found.keys() - named.keys()
        named |= found
    return hashlib.sha256(repr((said, sorted(helpers))).encode()).hexdigest()[:12]


def _described(value: Any, named: Named, above: tuple[int, ...]) -> Any:
    """``value`` as nested tuples of texts; adds the globals that its functions refer to, to ``named``.

    ``above``: ids of the enclosing values, since a recursive function contains itself.
    """
    if id(value) in above:
        return "itself"
    inner = functools.partial(_described, named=named, above=(*above, id(value)))
    if isinstance(value, enum.Enum):
        return "enum", type(value).__qualname__, value.name
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Placement):
        return "placement", repr(value)
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
        named |= {(name, id(found)): found for name, found in _globals_of(value)}
        cells = tuple(_content(cell, inner) for cell in value.__closure__ or ())
        return "function", inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__), cells
    if isinstance(value, MethodType):
        return "method", inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return "partial", inner(value.func), inner(value.args), inner(value.keywords)
    return _by_kind(value, inner)


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a user's function refers to; none for functions of installed packages."""
    installed = INSTALLED & set(PurePath(function.__code__.co_filename).parts)
    if installed or _shipped(function.__globals__.get("__name__")):
        return
    for name in _names(function.__code__):
        if name in function.__globals__ and not name.startswith("__"):
            yield name, function.__globals__[name]


def _shipped(module: Any) -> bool:
    return str(module).partition(".")[0] in SHIPPED


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: Any, inner: Any) -> Any:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # the closure's variable is not assigned yet
        return "empty"


def _by_kind(value: Any, inner: Any) -> Any:
    """Modules, classes, operators and builtins by name; dataclasses also by their fields; callable objects also by the code of
    ``__call__`` and their attributes; wrappers (``functools.lru_cache``) also by what they wrap."""
    if isinstance(value, (type, ModuleType)):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if schema_of(value) is not None:
        return "operator", str(value)
    kind, name = type(value), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    call = inspect.getattr_static(kind, "__call__", None)
    called = isinstance(call, FunctionType)
    own: Any = ()
    if dataclasses.is_dataclass(value):
        own = tuple((f.name, inner(getattr(value, f.name, None))) for f in dataclasses.fields(value))
    elif called and not _shipped(kind.__module__) and hasattr(value, "__dict__"):
        own = inner(vars(value))
    elif inspect.getattr_static(value, "__wrapped__", None) is not None:
        own = inner(value.__wrapped__)
    return kind.__module__, kind.__qualname__, name, inner(call) if called else (), own
