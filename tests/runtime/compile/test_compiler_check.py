"""The check of which vector instructions the C++ compiler supports: once, in a thread, for the best set only, and cached in a file."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from torch._inductor import codecache, config, cpu_vec_isa

from fxshard._torch_compat.inductor import cpp
from fxshard.runtime.compile import compiler_check


@pytest.fixture
def folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpp, "vector_instructions_key", lambda: ("this machine",))
    return cache_folder


def asked(monkeypatch: pytest.MonkeyPatch, answer: bool | Exception = True, cache: bool = True) -> list[str]:
    """What a new process does: it "asks" the compiler, or "takes" the answer from a file."""
    did: list[str] = []

    def ask() -> bool:
        did.append("asks")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compiler_check, "_THREADS", [])
    monkeypatch.setattr(cpp, "check_vector_instructions", ask)
    monkeypatch.setattr(cpp, "precompile_header", lambda: None)
    monkeypatch.setattr(cpp, "take_answer", lambda: did.append("takes"))
    compiler_check.start_compiler_check(cache)
    compiler_check.start_compiler_check(cache)
    compiler_check.wait_for_compiler_check()
    return did


def test_the_answer_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, cache=False) == ["asks"] and not folder.exists()
    assert asked(monkeypatch) == ["asks"]
    (file,) = folder.iterdir()
    assert set(asked(monkeypatch)) == {"takes"} and asked(monkeypatch, cache=False) == ["asks"]
    file.write_text("something else")
    assert asked(monkeypatch) == ["asks"] and set(asked(monkeypatch)) == {"takes"}
    monkeypatch.setattr(cpp, "vector_instructions_key", lambda: ("another compiler",))
    assert asked(monkeypatch) == ["asks"]
    monkeypatch.setenv("FXSHARD_CACHE", "0")
    assert asked(monkeypatch) == ["asks"] and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("answer", [False, OSError("no compiler")])
def test_a_failed_check_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | Exception) -> None:
    assert asked(monkeypatch, answer) == ["asks"] and not folder.exists()
    assert asked(monkeypatch, answer) == ["asks"]


def test_the_real_question_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached answer is what Inductor finds by itself, and takes no process."""
    question = cpp.vector_instructions_key()
    if not question:
        pytest.skip("Inductor does not check on this machine")
    found = list(map(str, cpu_vec_isa.valid_vec_isa_list()))
    assert set(found) <= set(question)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    cpp.take_answer()
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == found == list(map(str, cpp._sets()))


class Pretended(cpu_vec_isa.VecISA):
    """A set of vector instructions whose two test programs are recorded, not compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        works = self.check_build(f"{self.name}, a program")
        return self.check_build(f"{self.name}, further instructions") or works


@pytest.mark.parametrize(
    ("fails", "kept", "tried", "usable"),
    [
        ("", True, ["best, a program", "best, further instructions"], ["best", "lesser"]),
        ("further", False, None, ["best", "lesser"]),
        ("best", False, None, ["lesser"]),
    ],
)
def test_only_the_best_set_is_tried(
    monkeypatch: pytest.MonkeyPatch, fails: str, kept: bool, tried: list[str] | None, usable: list[str]
) -> None:
    """If a program of the best set fails, Inductor checks all sets as usual, and nothing is cached."""
    programs: list[str] = []

    def check_build(self: Pretended, code: str) -> bool:
        programs.append(code)
        return not fails or fails not in code

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Pretended("best"), Pretended("lesser"), Pretended("not this processor's")])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["best", "lesser"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__))
    if not cpp.vector_instructions_key():
        pytest.skip("Inductor does not check on this machine")
    assert cpp.check_vector_instructions() == kept
    if tried is not None:
        assert programs == tried
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == usable
    assert cpu_vec_isa.VecISA.check_build is check_build
    assert not cpp.check_vector_instructions(), "an answer that was known before is not a new result"


def test_the_precompiled_header_is_the_one_that_a_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpp.vector_instructions_key() or not config.cpp_cache_precompile_headers:
        pytest.skip("no header is compiled on this machine")
    wanted: list[object] = []

    def precompile(*args: object, **kwargs: object) -> str:
        wanted.append((args, kwargs, kwargs["vec_isa"].build_arch_flags()))  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(codecache, "_precompile_header", precompile)
    for begin in (cpp.precompile_header, lambda: codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], f"// {monkeypatch}")):
        with pytest.raises(KeyboardInterrupt):
            begin()
    assert wanted[0] == wanted[1]


def test_no_check_if_the_environment_names_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert cpp.vector_instructions_key() == ()
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    with config.patch({"cpp.simdlen": 256}):
        assert cpp.vector_instructions_key() == ()
