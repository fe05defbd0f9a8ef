"""Mutants: each changes one place of the source, still parses, and is caught or survives depending on the tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import PACKAGES, Mutant, caught_by, drawn, mutants_of, rings_of

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Words."""

def f(a: int = 3, *, b: bool = False) -> int:
    """Words: 1 + 1."""
    total = 0
    if a < 2 and not b:
        total += max(a, 7)
        print("é", total)
    elif a == 5:
        raise ValueError(a + 1)
    return total if a in (1, 2) else -a // 2
'''


def texts() -> list[tuple[str, str]]:
    return [(one.kind, SOURCE[one.start : one.end] + " -> " + one.after) for one in mutants_of("f.py", SOURCE)]


@pytest.mark.parametrize(
    "expected",
    [
        ("comparison", "a < 2 -> ((a) <= (2))"),
        ("comparison", "a in (1, 2) -> ((a) not in ((1, 2)))"),
        ("and, or", "a < 2 and not b -> ((a < 2) or (not b))"),
        ("sign", "not b -> (b)"),
        ("constant", "False -> True"),
        ("constant", "7 -> (7 + 1)"),
        ("function", "max -> min"),
        ("condition", "a == 5 -> (not (a == 5))"),
        ("operator", "-a // 2 -> ((-a) * (2))"),
        ("statement left out", "total += max(a, 7) -> pass"),
        ("statement left out", 'print("é", total) -> pass'),
    ],
)
def test_mutants_of_each_kind(expected: tuple[str, str]) -> None:
    assert expected in texts()


def test_docstrings_annotations_and_errors_are_not_mutated() -> None:
    assert not any(text.startswith(("a + 1", "1 + 1", "int ", "ValueError")) for _, text in texts())


def test_every_mutant_of_a_room_parses_and_differs() -> None:
    for file in sorted((ROOT / "fxshard" / "layout").rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        plain = ast.dump(ast.parse(source))
        for one in mutants_of(str(file), source):
            assert ast.dump(ast.parse(one.apply(source))) != plain, one


def test_a_seed_gives_the_same_mutants() -> None:
    some = drawn(ROOT, PACKAGES, 30, 0)
    assert some == drawn(ROOT, PACKAGES, 30, 0) != drawn(ROOT, PACKAGES, 30, 1) and len(set(some)) == 30


def test_tests_of_the_same_name_come_first() -> None:
    rings = list(rings_of("fxshard/passes/lowering/lower.py", ROOT))
    assert rings[0] == ("tests/passes/lowering/test_lower.py",) and rings[1] == ("tests/passes/lowering",) and rings[-1] == ("tests",)


@pytest.mark.parametrize(("test", "caught"), [("assert f() == 2", True), ("assert f() >= 0", False)])
def test_a_precise_test_catches_a_mutant(test: str, caught: bool, tmp_path: Path) -> None:
    source = "def f():\n    return 1 + 1\n"
    (tmp_path / "fxshard").mkdir()
    (tmp_path / "fxshard" / "sums.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(f"from fxshard.sums import f\n\ndef test_f():\n    {test}\n")
    mutant = next(one for one in mutants_of("fxshard/sums.py", source) if one.after == "((1) - (1))")
    assert caught_by(mutant, tmp_path, 1, [], 60.0) == ("tests/test_sums.py::test_f" if caught else "")
    assert (tmp_path / "fxshard" / "sums.py").read_text() == source
    assert isinstance(mutant, Mutant)


def test_a_test_that_fails_without_the_mutant_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fxshard").mkdir()
    (tmp_path / "fxshard" / "sums.py").write_text("ONE = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text("def test_f():\n    assert False\n")
    (mutant,) = mutants_of("fxshard/sums.py", "ONE = 1\n")
    with pytest.raises(RuntimeError, match="without the mutant too"):
        caught_by(mutant, tmp_path, 1, [], 60.0)
