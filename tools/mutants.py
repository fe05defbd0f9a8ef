"""Mutation check: breaks places of the code drawn at random, one at a time, and runs the tests until one fails.

    python tools/mutants.py                       30 places of the packages that decide, drawn by seed 0
    python tools/mutants.py --list --seed 3       only says which
    python tools/mutants.py --only 7,12 --rings 3 some of them, against the whole suite

Each mutant is one change of a copy of the repository: an operator, a comparison, a condition, a constant, min and max, a statement left
out. Tests run in rings, the nearest first: the file of the same name, the folder that mirrors the package, the tests of planning and
lowering, the whole suite; a mutant that a ring catches goes no further. Exits with 1 if more than a tenth survive. A survivor is either
equal to what it was made of (a cache's size, an order that decides nothing) or lacks a test: that is for a person to say.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "fxshard"
PACKAGES = ("solver", "passes", "layout", "strategies")
COPIED = ("fxshard", "tests", "tools", "bench", "examples", "pyproject.toml", "README.md", "docs", "Makefile")
NEAR = ("tests/layout", "tests/solver", "tests/passes/planning", "tests/passes/lowering", "tests/passes/annotation", "tests/passes/memory")
NEAR += ("tests/plans", "tests/strategies", "tests/models/test_equality.py")
"""The third ring."""
FAILED = 1
SLOW = "no end"

COMPARISONS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "*"}
OPERATORS |= {ast.BitOr: "&", ast.BitAnd: "|"}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""What only words errors, or fails by itself when it is changed."""


@dataclass(frozen=True, order=True)
class Mutant:
    """A change of one place: characters ``start`` to ``end`` of a file become ``after``."""

    file: str
    line: int
    start: int
    end: int
    after: str
    kind: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


class _Places(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts, self.bytes = starts, source.encode()

    def offset(self, line: int, column: int) -> int:
        return len(self.bytes[: self.starts[line - 1] + column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))]

    def add(self, node: ast.expr | ast.stmt, after: str, kind: str) -> None:
        self.found.append(Mutant(self.file, node.lineno, *self.span(node), after, kind))

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, UNTOUCHED):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            new = COMPARISONS[type(node.ops[0])]
            self.add(node, f"(({self.text(node.left)}) {new} ({self.text(node.comparators[0])}))", "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = OPERATORS.get(type(node.op))
        if new is not None and not (_is_text(node.left) or _is_text(node.right)):
            self.add(node, f"(({self.text(node.left)}) {new} ({self.text(node.right)}))", "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "(" + word.join(f"({self.text(one)})" for one in node.values) + ")", "and, or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.add(node, f"({self.text(node.operand)})", "sign")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self.add(node, f"({node.value} + 1)", "constant")

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "log":
            return
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            self.add(node.func, FUNCTIONS[node.func.id], "function")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.add(node.test, f"(not ({self.text(node.test)}))", "condition")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, f"(not ({self.text(node.test)}))", "condition")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "pass", "statement left out")
            self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of one file, in the order of its lines."""
    places = _Places(file, source)
    places.visit(ast.parse(source))
    return sorted(set(places.found))


def drawn(root: Path, packages: tuple[str, ...], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of the packages, each place as likely as any other."""
    files = [file for package in packages for file in sorted((root / PACKAGE / package).rglob("*.py"))]
    found = [one for file in files for one in mutants_of(str(file.relative_to(root)), file.read_text(encoding="utf-8"))]
    return sorted(random.Random(seed).sample(found, min(count, len(found))))


def rings_of(file: str, root: Path) -> Iterator[tuple[str, ...]]:
    """Paths of tests, the nearest ones first: those of the file (none if no test has its name), the folder, ``NEAR``, all."""
    path = Path(file)
    mirror = Path("tests", *path.parts[1:-1])
    same = mirror / f"test_{path.stem}.py"
    yield (str(same),) if (root / same).exists() else ()
    while not (root / mirror).is_dir():
        mirror = mirror.parent
    yield (str(mirror),)
    yield NEAR
    yield ("tests",)


def caught_by(mutant: Mutant, copy: Path, rings: int, pytest_args: list[str], seconds: float) -> str:
    """The test that failed first, "" if none did within the first ``rings`` rings. Tests that do not end in ``seconds`` have failed.

    Raises RuntimeError if that test fails without the mutant too: then it tells nothing.
    """
    file = copy / mutant.file
    source = file.read_text(encoding="utf-8")
    for number, paths in enumerate(rings_of(mutant.file, copy)):
        if number >= rings:
            break
        if not paths:
            continue
        file.write_text(mutant.apply(source), encoding="utf-8")
        try:
            failed = _first_failure(copy, [*pytest_args, *paths], seconds)
        finally:
            file.write_text(source, encoding="utf-8")
        if failed == SLOW:
            return f"{' '.join(paths)}: no end after {seconds:.0f} s"
        if failed:
            if _first_failure(copy, [failed], seconds):
                raise RuntimeError(f"{failed} fails without the mutant too")
            return failed
    return ""


def _first_failure(copy: Path, arguments: list[str], seconds: float) -> str:
    """The test, or the file, that fails first; SLOW if there is no end, "" if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(copy / ".numba")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *arguments]
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return SLOW
    if not run.returncode:
        return ""
    said = [line.split(" ", 1)[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return said[0].partition(" - ")[0].strip() if said else arguments[-1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/mutants.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--only", default="", help="numbers of mutants, 7,12 or 10-19")
    parser.add_argument("--rings", type=int, default=4, help="how many rings of tests a mutant goes through")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long the tests of a ring may take; a mutant may loop for ever")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, as one text")
    chosen = parser.parse_args(arguments)
    mutants = list(enumerate(drawn(ROOT, tuple(chosen.packages.split(",")), chosen.count, chosen.seed)))
    if chosen.only:
        numbers = set(_numbers(chosen.only))
        mutants = [(number, one) for number, one in mutants if number in numbers]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        if not chosen.list:
            _copy(copy)
        for number, one in mutants:
            print(f"{number:3d} {one.file}:{one.line} {one.kind}: {_shown(one)}", flush=True)
            if chosen.list:
                continue
            start = time.perf_counter()
            caught = caught_by(one, copy, chosen.rings, chosen.pytest.split(), chosen.seconds)
            survived += not caught
            print(f"    {caught or 'SURVIVED'} ({time.perf_counter() - start:.0f} s)", flush=True)
    if not chosen.list:
        print(f"{len(mutants) - survived} of {len(mutants)} caught")
    return FAILED if survived > len(mutants) / 10 else 0


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _shown(one: Mutant) -> str:
    before = (ROOT / one.file).read_text(encoding="utf-8")[one.start : one.end]
    return " ".join(f"{before}  ->  {one.after}".split())[:110]


def _copy(copy: Path) -> None:
    """The repository's tracked parts that tests need."""
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"))
        elif source.exists():
            shutil.copy(source, copy / name)


if __name__ == "__main__":
    sys.exit(main())
