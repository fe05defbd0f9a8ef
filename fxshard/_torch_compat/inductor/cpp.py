"""Private names of torch (2.13): what Inductor asks of the C++ compiler once a process, or once a machine, before its first kernel."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

FURTHER = ("_is_avx512_bf16_supported", "_is_amx_fp16_supported")
"""Instructions that a set may have besides those of its name: the set's attribute, and the function of ``torch.cpu`` that knows."""


def import_compiler() -> None:
    """Imports what ``ask`` needs: two threads that import modules which import each other may each wait for the other."""
    from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa  # noqa: F401
    from torch.utils import _filelock, cpp_extension  # noqa: F401


def ask() -> bool:
    """Compiles, or finds, the programs by which Inductor knows whether the best set of vector instructions can be used.

    Where it can, as far as the compiler and the processor go, the lesser sets, whose programs are the same with fewer flags, are taken to
    work too; otherwise Inductor asks for each. Whether all of the answers were yes, and so may be kept.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    best = _best() if question() and not valid_vec_isa_list.cache_info().currsize else None
    if best is not None and _works(best):
        take_answer()
        return True
    valid_vec_isa_list()
    return False


def _works(one: Any) -> bool:
    """Whether Inductor says so, and none of the programs that it tried for that failed."""
    from torch._inductor.cpu_vec_isa import VecISA

    real, answers = VecISA.check_build, list[bool]()

    def noted(self: Any, code: str) -> bool:
        answers.append(real(self, code))
        return answers[-1]

    with _check_build(noted):
        return bool(one) and bool(answers) and all(answers)


def precompile_header() -> None:
    """The header of Inductor's kernels, as it will want it if the best set of vector instructions can be used; Inductor keeps it."""
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    kernels, best = codecache.CppPythonBindingsCodeCache, _best()
    header = kernels._get_uncompiled_header("cpu")
    if best is None or header is None or not question() or not config.cpp_cache_precompile_headers:
        return
    presumed: Any = type(best)()
    for name in FURTHER:
        if hasattr(presumed, name):
            setattr(presumed, name, getattr(torch.cpu, name)())
    options = {**kernels.cpp_compile_command_flags, "device_type": "cpu", "extra_flags": (), "use_relative_path": False}
    options |= {"vec_isa": presumed}
    of_kernel = CppTorchDeviceOptions(compile_only=False, min_optimize=False, **options)
    line = CppBuilder(name="o", sources="i", BuildOption=of_kernel).get_command_line()
    codecache._precompile_header(header, line, min_optimize=False, **options)


def take_answer() -> None:
    """All sets of vector instructions that the processor has can be used: Inductor need not find out, for which it starts processes."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with _check_build(lambda self, code: True), config.patch({"cpp.vec_isa_ok": True}):
        valid_vec_isa_list()


def question() -> tuple[str, ...]:
    """All that the answer depends on: processor, compiler, torch; empty where nobody asks, or the environment tells which set to use."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    told = config.cpp.vec_isa_ok is not None or config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
    if platform.machine() != "x86_64" or sys.platform != "linux" or told:
        return ()
    compiler = get_cpp_compiler()
    machine = [*os.uname(), platform.processor(), *map(str, _sets())]
    return (*machine, compiler, get_compiler_version_info(compiler), torch.__version__, str(torch.__file__), sys.version, sys.executable)


def _sets() -> list[Any]:
    """The sets of vector instructions that Inductor knows and the processor has, best first."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    have = x86_isa_checker()
    return [one for one in supported_vec_isa_list if all(flag in have for flag in str(one).split())]


def _best() -> Any:
    return next(iter(_sets()), None)


@contextlib.contextmanager
def _check_build(instead: Callable[[Any, str], bool]) -> Iterator[None]:
    """With another function in place of that which compiles and loads a program for a set of vector instructions."""
    from torch._inductor.cpu_vec_isa import VecISA

    real = VecISA.check_build
    VecISA.check_build = instead
    try:
        yield
    finally:
        VecISA.check_build = real
