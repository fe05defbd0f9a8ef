"""Private names of torch (2.13): Inductor's vector instructions, its tests of them and its precompiled header, before its first kernel.

What would replace it: an option of Inductor that names the vector instructions and builds the header at install time, and a cache key of
Inductor's that contains them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

FURTHER = ("_is_avx512_bf16_supported", "_is_amx_fp16_supported")
"""Optional instructions of a set: names of both the set's attribute and the function of ``torch.cpu`` that detects them."""


def import_compiler() -> None:
    """Import the modules that the functions below need, in one thread: two threads that import modules with cyclic imports can deadlock."""
    from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa  # noqa: F401
    from torch.utils import _filelock, cpp_extension  # noqa: F401


def check_vector_instructions() -> bool:
    """Test whether the best set of vector instructions works; compiles Inductor's test program, or finds it in the cache.

    If it works, the lesser sets, whose test programs are the same with fewer flags, are assumed to work too; otherwise Inductor tests each.
    Returns whether all sets work, so that the result may be cached.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    best = _best() if vector_instructions_key() and not valid_vec_isa_list.cache_info().currsize else None
    if best is not None and _works(best):
        take_answer()
        return True
    valid_vec_isa_list()
    return False


def _works(one: Any) -> bool:
    """Whether Inductor accepts the set and none of its test programs failed."""
    from torch._inductor.cpu_vec_isa import VecISA

    real, answers = VecISA.check_build, list[bool]()

    def noted(self: Any, code: str) -> bool:
        answers.append(real(self, code))
        return answers[-1]

    with _check_build(noted):
        return bool(one) and bool(answers) and all(answers)


def precompile_header() -> None:
    """Precompile the header of Inductor's kernels, into Inductor's cache, on the assumption that the best vector instructions work."""
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    kernels, best = codecache.CppPythonBindingsCodeCache, _best()
    header = kernels._get_uncompiled_header("cpu")
    if best is None or header is None or not vector_instructions_key() or not config.cpp_cache_precompile_headers:
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
    """Tell Inductor the answer that all vector instructions of the processor work, which saves its tests in subprocesses."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with _check_build(lambda self, code: True), config.patch({"cpp.vec_isa_ok": True}):
        valid_vec_isa_list()


@contextlib.contextmanager
def instructions_in_key() -> Iterator[None]:
    """Within it, Inductor's key of a graph contains this processor's instructions.

    Inductor writes its code for one width of vectors, compiles it for this processor, and leaves both out of the key. From a folder that a
    processor with narrower vectors has filled, code would write beyond the end of tensors; code for wider vectors would leave elements out.
    The metadata of ahead-of-time code, of which code for this process makes no use, is the only setting in the key that is free text.
    """
    from torch._inductor import config

    with config.patch({"aot_inductor.metadata": {**config.aot_inductor.metadata, "fxshard_instructions": instructions()}}):
        yield


def instructions() -> str:
    """The vector instructions for which Inductor writes code, and all that this processor has; without the former if no compiler works."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        picked = str(pick_vec_isa())
    except InvalidCxxCompiler:
        picked = "no compiler"
    return f"{picked}; {' '.join(sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True))}"


def vector_instructions_key() -> tuple[str, ...]:
    """The cache key of ``check_vector_instructions``: processor, compiler, torch; empty on other platforms, or if settings choose the
    instructions."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    told = config.cpp.vec_isa_ok is not None or config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
    if platform.machine() != "x86_64" or sys.platform != "linux" or told:
        return ()
    compiler = get_cpp_compiler()
    machine = [*os.uname(), platform.processor(), *map(str, _sets())]
    return (*machine, compiler, get_compiler_version_info(compiler), torch.__version__, str(torch.__file__), sys.version, sys.executable)


def _sets() -> list[Any]:
    """The sets of vector instructions that both Inductor and the processor support, best first."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    have = x86_isa_checker()
    return [one for one in supported_vec_isa_list if all(flag in have for flag in str(one).split())]


def _best() -> Any:
    return next(iter(_sets()), None)


@contextlib.contextmanager
def _check_build(instead: Callable[[Any, str], bool]) -> Iterator[None]:
    """Within it, ``instead`` replaces the function that compiles and loads a test program."""
    from torch._inductor.cpu_vec_isa import VecISA

    real = VecISA.check_build
    VecISA.check_build = instead
    try:
        yield
    finally:
        VecISA.check_build = real
