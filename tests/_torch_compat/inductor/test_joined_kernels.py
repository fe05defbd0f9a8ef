"""The C++ kernels of a module are compiled in one file, with the same results; if one does not compile, Inductor's error names it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

from fxshard._torch_compat.inductor import joined_kernels as joined
from fxshard._torch_compat.inductor.joined_kernels import joined_kernels, stands_alone

INCLUDE = joined.INCLUDE
SCALE = """extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{
    for (int64_t i = 0; i < ks0; ++i) { out_ptr0[i] = in_ptr0[i] * FACTOR; }
}
"""
FLAGS = """extern "C"  void  kernel(bool* in_out_ptr0)
{
    #pragma GCC ivdep
    for (int64_t i = 0; i < 4; ++i) { in_out_ptr0[i] = !in_out_ptr0[i]; }
}
"""
TYPES = ["const float*", "float*", "const int64_t"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Collects the text of each file that is compiled or found in the cache."""
    texts: list[str] = []
    real = codecache.CppPythonBindingsCodeCache.load_async.__func__

    def load_async(cls: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        texts.append(main_code)
        return real(cls, main_code, *args, **kwargs)

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", classmethod(load_async))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return texts


def scale(by: float) -> tuple[list[str], str]:
    return TYPES, INCLUDE + SCALE.replace("FACTOR", f"static_cast<float>({by})")


def compiled(*kernels: tuple[list[str], str]) -> list[Callable[..., Any]]:
    """Compiles kernels as a generated module does."""
    compiler = AsyncCompile()
    scope = {f"cpp_fused_{i}": compiler.cpp_pybinding(*kernel) for i, kernel in enumerate(kernels)}
    compiler.wait(scope)
    return list(scope.values())


def results(functions: list[Callable[..., Any]]) -> list[torch.Tensor]:
    given, flags = torch.linspace(-3, 3, 7), torch.tensor([True, False, True, True])
    outs = [torch.empty(7) for _ in functions[:-1]]
    for function, out in zip(functions[:-1], outs, strict=True):
        function(given, out, 7)
    functions[-1](flags)
    return [*outs, flags]


def test_kernels_in_one_file_compute_what_each_alone_does(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [scale(0.1), scale(-7.25), scale(1e-30), (["bool*"], INCLUDE + FLAGS)]
    alone = results(compiled(*kernels))
    assert len(loaded) == 4
    loaded.clear()
    with joined_kernels():
        together = results(compiled(*kernels))
    assert len(loaded) == 1 and all(f'"kernel_{i}"' in loaded[0] for i in range(4))
    monkeypatch.setattr(joined, "MOST", 3)
    with joined_kernels():
        cut = results(compiled(*kernels))
    assert len(loaded) == 3 and loaded[2].count('extern "C"') == 1, "three in one file; the last is alone, in a file as Inductor writes it"
    assert alone[0].tolist() == (torch.linspace(-3, 3, 7) * 0.1).tolist() and alone[3].tolist() == [False, True, False, False]
    for one, two, three in zip(alone, together, cut, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_a_kernel_that_does_not_compile_is_named(loaded: list[str], caplog: pytest.LogCaptureFixture) -> None:
    broken = TYPES, INCLUDE + SCALE.replace("FACTOR", "no_such_name")
    assert stands_alone(broken[1])
    with joined_kernels(), caplog.at_level(logging.WARNING, "fxshard"), pytest.raises(CppCompileError, match="no_such_name"):
        compiled(scale(2.0), broken)
    assert "2 kernels could not be compiled together; they are compiled one by one" in caplog.text
    assert len(loaded) == 3


@pytest.mark.parametrize(
    "source",
    [
        "#include <vector>\n" + SCALE,
        INCLUDE + "static int helper() { return 1; }\n" + SCALE,
        INCLUDE + SCALE + "static int helper() { return 1; }\n",
        INCLUDE + SCALE.replace("    for", "#define N 3\n    for"),
        INCLUDE + SCALE.replace("FACTOR", "other::kernel(3)"),
        INCLUDE + SCALE.replace("kernel(", "another("),
        INCLUDE + SCALE.rstrip().removesuffix("}"),
    ],
)
def test_sources_that_cannot_be_joined_are_recognised(source: str) -> None:
    assert not stands_alone(source)
    assert stands_alone(INCLUDE + SCALE) and stands_alone("\n" + INCLUDE + FLAGS)


def test_nothing_is_joined_if_inductors_template_is_unknown(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_template", lambda: None)
    with joined_kernels():
        results(compiled(scale(0.1), scale(0.2), (["bool*"], INCLUDE + FLAGS)))
    assert len(loaded) == 3
