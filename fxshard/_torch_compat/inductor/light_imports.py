"""Private names of torch (2.13): code of Inductor's is loaded without importing what made it.

A generated module imports the names that it may need from where Inductor defines them, and thereby all that lowers graphs and writes code:
half a second of a process that only runs what another one compiled.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Kernels of Inductor's ``extern_kernels`` that are the functions of torch of the same name."""
_ONE = threading.RLock()
"""Two threads that load would each put back what the other had put in place."""


class ExternKernels:
    """``extern_kernels``: what most models call is at hand, for anything else Inductor is imported."""

    def __getattr__(self, name: str) -> Any:
        if name in PRODUCTS and "torch._inductor.select_algorithm" not in sys.modules:
            return getattr(torch, name)
        from torch._inductor.select_algorithm import extern_kernels

        return getattr(extern_kernels, name)


def _instead() -> dict[str, SimpleNamespace]:
    """What stands for the modules that are left out."""
    from torch._inductor.utils import _align

    return {
        "torch._inductor.select_algorithm": SimpleNamespace(extern_kernels=ExternKernels()),
        "torch._inductor.codegen.memory_planning": SimpleNamespace(_align=_align),
    }


@contextlib.contextmanager
def light_imports() -> Iterator[None]:
    """While code that Inductor keeps is loaded for the CPU.

    The header of kernels is left out as well: it is wanted where one is compiled, and preprocessed even if all are there.
    """
    from torch._inductor import codecache

    instead = _instead()

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        found = instead.get(name)
        if found is None or name in sys.modules or any(not hasattr(found, one) for one in fromlist or ("",)):
            return builtins.__import__(name, globals, locals, fromlist, level)
        return found

    def reload(key: str, path: str, set_sys_modules: bool = True) -> ModuleType:
        module = ModuleType(f"torch._inductor.runtime.compile_tasks.{key}")
        module.__file__ = path
        vars(module).update(key=key, __builtins__={**vars(builtins), "__import__": imported})
        with open(path) as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), vars(module))
        if set_sys_modules:
            sys.modules[module.__name__] = module
        return module

    with _ONE:
        real = codecache._reload_python_module, codecache._precompile_header
        codecache._reload_python_module, codecache._precompile_header = reload, lambda *args, **kwargs: ""
        try:
            yield
        finally:
            codecache._reload_python_module, codecache._precompile_header = real
