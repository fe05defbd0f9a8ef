"""The C++ compiler is asked in a thread, once; where a file has the answer, no process is started for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch._inductor import cpu_vec_isa

from fxshard._torch_compat import cpp
from fxshard.runtime import compiler_check


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cpp, "question", lambda: ("this machine",))
    return tmp_path / "cache"


def asked(monkeypatch: pytest.MonkeyPatch, answer: bool | Exception = True, cache: bool = True) -> list[str]:
    """What a new process does: "asks", or "takes" the answer of a file."""
    did: list[str] = []

    def ask() -> bool:
        did.append("asks")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compiler_check, "_ASKED", [])
    monkeypatch.setattr(cpp, "ask", ask)
    monkeypatch.setattr(cpp, "take_answer", lambda: did.append("takes"))
    compiler_check.ask_compiler(cache)
    compiler_check.ask_compiler(cache)
    compiler_check.wait_for_compiler()
    return did


def test_the_answer_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, cache=False) == ["asks"] and not folder.exists()
    assert asked(monkeypatch) == ["asks"]
    (file,) = folder.iterdir()
    assert set(asked(monkeypatch)) == {"takes"} and asked(monkeypatch, cache=False) == ["asks"]
    file.write_text("something else")
    assert asked(monkeypatch) == ["asks"] and set(asked(monkeypatch)) == {"takes"}
    monkeypatch.setattr(cpp, "question", lambda: ("another compiler",))
    assert asked(monkeypatch) == ["asks"]
    monkeypatch.setenv("FXSHARD_CACHE", "0")
    assert asked(monkeypatch) == ["asks"] and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("answer", [False, OSError("no compiler")])
def test_a_set_that_does_not_work_is_asked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | Exception) -> None:
    assert asked(monkeypatch, answer) == ["asks"] and not folder.exists()
    assert asked(monkeypatch, answer) == ["asks"]


def test_the_real_question_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file stands for is what Inductor finds out by itself, without a process."""
    question = cpp.question()
    if not question:
        pytest.skip("nobody asks on this machine")
    found = list(map(str, cpu_vec_isa.valid_vec_isa_list()))
    assert set(found) <= set(question)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    cpp.take_answer()
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == found == cpp._sets()
