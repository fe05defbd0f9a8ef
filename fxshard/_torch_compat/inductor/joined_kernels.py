"""Private names of torch (2.13): compile several C++ kernels of a generated module in one file.

Inductor compiles each kernel in a separate file: 0.7 s of processor time, 0.45 of it for the header and linking. A further kernel in the
same file takes 0.05 s. Kernels are assigned to files by their order in the module alone, so that a process that loads the module finds the
same files.

What would replace it: an option of Inductor for one C++ file a module, which AOTInductor has.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("fxshard")
MOST = 16
"""The most kernels in a file; the files of a module are compiled in parallel."""
INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_HEAD = re.compile(rf'\s*{re.escape(INCLUDE)}extern "C"\s+void\s+kernel\(')
_ENTRY, _METHODS, _END, _MODULE = (
    "static PyObject* {entry_func}_py",
    "static PyMethodDef py_methods[] = {{",
    "{{NULL, NULL, 0, NULL}}",
    "static struct PyModuleDef",
)
_JOINED: ContextVar[bool] = ContextVar("joined kernels", default=False)


@contextlib.contextmanager
def joined_kernels() -> Iterator[None]:
    """Within it, kernels that Inductor compiles in this thread, or loads, are joined in files."""
    _install()
    token = _JOINED.set(True)
    try:
        yield
    finally:
        _JOINED.reset(token)


@dataclass(eq=False)
class _File:
    """Kernels (types of arguments, source) that are compiled together; ``real`` compiles a single one."""

    compiler: Any
    real: Callable[..., Any]
    kernels: list[tuple[Sequence[str], str]] = field(default_factory=list)
    load: Callable[[], Any] | None = None

    def begin(self) -> None:
        from torch._inductor.async_compile import get_compile_threads
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

        if self.load is None:
            submit = self.compiler.submit if get_compile_threads() > 1 else None
            self.load = Kernels.load_async(_text(self.kernels), "cpu", submit_fn=submit)

    @functools.cached_property
    def functions(self) -> list[Callable[..., Any]]:
        from torch._inductor.exc import CppCompileError

        if len(self.kernels) == 1:
            return [self._alone(0)]
        self.begin()
        assert self.load is not None
        try:
            module = self.load()
        except CppCompileError as error:
            what = "%d kernels could not be compiled together; they are compiled one by one: %s"
            log.warning(what, len(self.kernels), str(error).splitlines()[0])
            return [self._alone(i) for i in range(len(self.kernels))]
        return [getattr(module, f"kernel_{i}") for i in range(len(self.kernels))]

    def _alone(self, place: int) -> Callable[..., Any]:
        found = self.real(self.compiler, *self.kernels[place])
        function: Callable[..., Any] = found.result() if hasattr(found, "result") else found
        return function


@dataclass(frozen=True)
class _Later:
    """A kernel that is not compiled yet."""

    file: _File
    place: int


@functools.cache
def _install() -> None:
    """Wrap, permanently, the two methods with which generated modules compile their kernels."""
    from torch._inductor.async_compile import AsyncCompile

    real, real_wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    @functools.wraps(real)
    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not _JOINED.get() or not stands_alone(source_code) or not _template():
            return real(self, argtypes, source_code)
        files: list[_File] = vars(self).setdefault("_fxshard_files", [])
        if not files or len(files[-1].kernels) == MOST:
            files.append(_File(self, real))
        files[-1].kernels.append((argtypes, source_code))
        if len(files[-1].kernels) == MOST:
            files[-1].begin()
        return _Later(files[-1], len(files[-1].kernels) - 1)

    @functools.wraps(real_wait)
    def wait(self: Any, scope: MutableMapping[str, Any]) -> None:
        for file in vars(self).get("_fxshard_files", ()):
            if len(file.kernels) > 1:
                file.begin()
        for name, value in list(scope.items()):
            if isinstance(value, _Later):
                scope[name] = value.file.functions[value.place]
        real_wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp_pybinding, wait


def stands_alone(source: str) -> bool:
    """Whether a kernel's source is only the header and one function, so that it can share a file."""
    head = _HEAD.match(source)
    if head is None or re.search(r"^#|\bextern\b|\bkernel\b", source[head.end() :], re.MULTILINE):
        return False
    depth, rest = 0, source[head.end() :].rstrip()
    for brace in re.finditer("[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 and brace[0] == "}":
            return brace.end() == len(rest)
    return False


@functools.cache
def _template() -> tuple[str, str, str, str] | None:
    """Inductor's text after a kernel in four parts: common code, the kernel's entry function, its row in the table of methods, the module.

    None if it has another form.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

    text = Kernels.suffix_template
    if [text.count(part) for part in (_ENTRY, _METHODS, _END, _MODULE)] != [1, 1, 1, 1]:
        return None
    once, rest = text.split(_ENTRY)
    entry, rest = rest.split(_METHODS)
    row, rest = rest.split(_END)
    return once, _ENTRY + entry, row, _MODULE + rest.split(_MODULE)[1]


def _text(kernels: Sequence[tuple[Sequence[str], str]]) -> str:
    """The source of one file: kernels with distinct names, an entry function for each, and a module with all of them."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

    parts = _template()
    assert parts is not None
    once, entry, row, module = parts
    text = [INCLUDE]
    for i, (_, source) in enumerate(kernels):
        text.append(f"#define kernel kernel_{i}\n{source.strip().removeprefix(INCLUDE)}\n#undef kernel\n")
    text.append(once.format(entry_func="kernel", extra_parse_arg=Kernels.extra_parse_arg))
    for i, (argtypes, _) in enumerate(kernels):
        arguments = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(argtypes))
        call = Kernels.call_entry_function.format(arguments).replace("kernel(", f"kernel_{i}(", 1)
        text.append(entry.format(entry_func=f"kernel_{i}", arg_len=len(argtypes), call_entry_func=call))
    rows = "".join(row.format(entry_func=f"kernel_{i}") for i in range(len(kernels)))
    text.append(f"{_METHODS.format()}{rows}{_END.format()}}};\n")
    text.append(module.format(entry_func="kernel"))
    return "\n".join(text)
