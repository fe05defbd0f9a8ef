"""Generated code loads without importing Inductor's code generation; the replacements are the same functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import maybe_profile

def call(name):
    return getattr(extern_kernels, name)

def import_later():
    from torch._inductor.select_algorithm import autotune_select_algorithm
    return autotune_select_algorithm
"""
CHILD = """
import sys
import torch
from torch._inductor.codecache import PyCodeCache
from fxshard._torch_compat.inductor.light_imports import PRODUCTS, light_imports

HEAVY = "torch._inductor.select_algorithm", "torch._inductor.lowering", "torch._inductor.codegen.memory_planning"
with light_imports():
    module = PyCodeCache.load_by_key_path("key", sys.argv[1])
found = {name: module.call(name) for name in PRODUCTS}
assert module.align(65) == 128 and not any(name in sys.modules for name in HEAVY)
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.codegen.memory_planning import _align
assert {name: getattr(extern_kernels, name) for name in PRODUCTS} == found and _align is module.align
assert module.call("convolution") is extern_kernels.convolution
assert module.import_later().__name__ == "autotune_select_algorithm"
try:
    module.call("no_such_kernel")
except AttributeError:
    print("done")
"""


def test_a_module_loads_without_code_generation(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    ran = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=240)
    assert ran.stdout == "done\n", ran.stderr


def test_replaced_functions_are_restored(tmp_path: Path) -> None:
    from torch._inductor import codecache

    from fxshard._torch_compat.inductor.light_imports import light_imports

    before = codecache._reload_python_module, codecache._precompile_header
    path = tmp_path / "module.py"
    path.write_text("raise ValueError('damaged')")
    with pytest.raises(ValueError, match="damaged"), light_imports():
        codecache.PyCodeCache.load_by_key_path("another key", str(path))
    assert (codecache._reload_python_module, codecache._precompile_header) == before
