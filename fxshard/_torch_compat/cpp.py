"""Private names of torch (2.13): what Inductor asks of the C++ compiler once a process, or once a machine, before its first kernel."""

from __future__ import annotations

import os
import platform
import sys

import torch

KERNEL = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0) { out_ptr0[0] = in_ptr0[0]; }
"""
ARGUMENTS = ("const float*", "float*")


def import_compiler() -> None:
    """Imports what ``ask`` needs: two threads that import modules which import each other may each wait for the other."""
    from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa  # noqa: F401
    from torch.utils import _filelock, cpp_extension  # noqa: F401


def ask() -> bool:
    """Compiles, or finds, a program for each set of vector instructions that the processor has, the header of kernels and one kernel.

    Inductor keeps the answers. Whether all of the sets can be used.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    CppPythonBindingsCodeCache.load_pybinding(list(ARGUMENTS), KERNEL)
    return len(valid_vec_isa_list()) == len(_sets())


def take_answer() -> None:
    """All sets of vector instructions that the processor has can be used: Inductor need not find out, for which it starts processes."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with config.patch({"cpp.vec_isa_ok": True}):
        valid_vec_isa_list()


def question() -> tuple[str, ...]:
    """All that the answer depends on: processor, compiler, torch; empty where nobody asks, or the answer is told by the environment."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    if platform.machine() != "x86_64" or sys.platform != "linux" or config.cpp.vec_isa_ok is not None:
        return ()
    compiler = get_cpp_compiler()
    machine = [*os.uname(), platform.processor(), *_sets()]
    return (*machine, compiler, get_compiler_version_info(compiler), torch.__version__, str(torch.__file__), sys.version, sys.executable)


def _sets() -> list[str]:
    """The sets of vector instructions that Inductor knows and the processor has."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    have = x86_isa_checker()
    return [str(one) for one in supported_vec_isa_list if all(flag in have for flag in str(one).split())]
