"""Checks what keeps the rooms apart: the direction of imports, private torch names, and the length of files.

    python tools/check_imports.py [root of the repository]

Imports count wherever they stand: at the top, inside a function, under TYPE_CHECKING.
Prints `file:line: what. Remedy: ...` for each violation and exits with 1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "fxshard"
COMPAT = "_torch_compat"
TABLE = "tools/check_imports.py"
MAX_LINES = 500
MEASURED = (PACKAGE, "tests", "tools", "bench", "examples")  # whose files may not grow over MAX_LINES
PUBLIC_TORCH_ONLY = (PACKAGE, "examples")  # where private torch names are forbidden


def _rooms() -> dict[str, frozenset[str]]:
    """Which rooms each room may import (itself aside). A room is a file or folder right under fxshard/."""
    base = {"errors", COMPAT, "sizes", "text_table", "objects", "targets", "collecting"}
    plan = base | {
        "layout",
        "shapes",
        "hardware",
        "mesh",
        "redistribution",
        "sharding_plan",
        "planning_graph",
        "call",
        "files",
        "memory_profile",
        "timeline",
    }
    program = plan | {"program", "size_inputs", "archive"}
    strategies = program | {"ops"}
    passes = strategies | {"strategies", "cost", "solver", "constraints", "plan_cache"}
    runtime = passes | {"passes"}
    origin = runtime | {"plan_at", "sizes_of_plan"}
    api = origin | {"runtime", "inspect", "origin"}
    testing = api | {"api"}
    public = testing | {"testing"}
    rooms: dict[str, set[str]] = {
        "errors": set(),
        "sizes": {"errors"},
        "targets": set(),
        "text_table": set(),
        "collecting": set(),
        "timeline": set(),
        COMPAT: {"errors"},
        "dynamic_text": {"errors"},
        "objects": {"errors", COMPAT},
        "layout": base,
        "shapes": base | {"layout"},
        "plan_at": {"sizes"},
        "sizes_of_plan": passes | {"passes", "plan_at"},
        "hardware": base | {"files"},
        "mesh": base | {"hardware"},
        "redistribution": base | {"layout", "mesh"},
        "planning_graph": base | {"shapes"},
        "call": base | {"planning_graph"},
        "constraints": base | {"layout"},
        "files": {"errors"},
        "factory": {"errors"},
        "child_process": {"errors"},
        "memory_profile": {"errors"},
        "sharding_plan": plan - {"sharding_plan"} | {"plan_at"},
        "program": plan,
        "size_inputs": plan | {"program"},
        "archive": plan | {"program", "ops", "size_inputs"},
        "ops": base,
        "strategies": strategies,
        "cost": strategies,
        "solver": set(),
        "plan_cache": strategies | {"strategies"},
        "solve_file": {"errors", "files", "solver"},
        "passes": passes,
        "runtime": runtime,
        "origin": origin,
        "inspect": program,
        "api": api,
        "testing": testing | {PACKAGE},
        "cli": public | {PACKAGE, "factory", "child_process", "solve_file", "dynamic_text"},
        "__init__": public,
        "__main__": {"cli"},
    }
    return {name: frozenset(allowed) for name, allowed in rooms.items()}


ROOMS = _rooms()

SHARED = dict.fromkeys(("plan_json", "plan_sizes", "plan_text", "comparison", "explanation", "reasons"), "sharding_plan") | {
    "hardware_file": "hardware",
    "side_effects": "objects",
    "steps": "redistribution",
    "detours": "redistribution",
    "verify_program": "program",
}
"""Files that belong to another file's room: a plan, its JSON and what can be read from it are one, hardware and its file, a program
and what holds in it, redistributions and their steps, objects and what a call leaves in them or in modules."""


@dataclass(frozen=True, order=True)
class Violation:
    file: str
    line: int
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}. Remedy: {self.remedy}"


@dataclass(frozen=True)
class Import:
    """`module` (absolute), then `name` out of it, if it is a `from` import; bound to `bound` in the file."""

    line: int
    module: str
    name: str | None
    bound: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """All imports of a file that lies in `package`, relative ones made absolute."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, None, alias.asname or alias.name.split(".")[0])
            case ast.ImportFrom():
                module = node.module or ""
                if node.level:
                    parts = package.split(".")
                    base = parts[: len(parts) - node.level + 1]
                    module = ".".join([*base, module] if module else base)
                for alias in node.names:
                    yield Import(node.lineno, module, alias.name, alias.asname or alias.name)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(node.lineno, module, None, "")


def room_of(imported: Import) -> str | None:
    """The room an import reaches into; the package's own name for its public names; None for what is not ours.

    None as well for a module right under the package that the table does not know: its file is reported, once.
    """
    parts = imported.path.split(".")
    if parts[0] != PACKAGE:
        return None
    if len(parts) > 1 and parts[1] in ROOMS:
        return parts[1]
    return PACKAGE if imported.module == PACKAGE else None


def is_private(path: str) -> bool:
    """Whether a dotted name that starts at torch passes through a private name.

    Exceptions: dunders, `torch._check`, and the names of operators, private or not, in public namespaces and in
    `torch.ops._c10d_functional`: an operator's schema is what graphs are made of.
    """
    parts = path.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "_check"]:
        return False
    if parts[:2] == ["torch", "ops"]:
        parts = [part for part in parts[2:3] if part != "_c10d_functional"]
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)


def private_names(tree: ast.AST, imports: list[Import]) -> Iterator[tuple[int, str]]:
    """Where a file names something private of torch: in imports, in attribute chains, in getattr with a literal."""
    torch_names: dict[str, str] = {}
    for item in imports:
        if item.path.split(".")[0] != "torch":
            continue
        if is_private(item.path):
            yield item.line, item.path
        elif item.bound:
            plain = item.name is None and item.bound == "torch"
            torch_names[item.bound] = "torch" if plain else item.path

    def dotted(node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                return torch_names.get(name)
            case ast.Attribute(value=value, attr=attr):
                inner = dotted(value)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
                inner = dotted(value)
            case _:
                return None
        return f"{inner}.{attr}" if inner else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Call):
            path = dotted(node)
            # Reported at the first private name of a chain, not again for what hangs on it.
            if path and is_private(path) and not is_private(path.rpartition(".")[0]):
                yield node.lineno, path


OF_TUPLES = ("_replace", "_asdict", "_fields")
"""Public names of a NamedTuple, in spite of the underscore."""


def private_attributes(tree: ast.Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    """Where a file reaches for a private attribute of something that is neither itself nor a namespace of operators.

    Chains that start at an import from torch are `private_names`' affair.
    """
    own = {"self", "cls", *(item.bound for item in imports if item.path.split(".")[0] == "torch")}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops"):
            own.update(target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__") or node.attr in OF_TUPLES:
            continue
        holder = ast.unparse(node.value)
        if holder.split(".")[0] not in own or holder.startswith("self."):
            yield node.lineno, f"{holder}.{node.attr}"


def check_direction(room: str, imports: list[Import]) -> Iterator[tuple[int, str, str]]:
    if room not in ROOMS:
        yield 1, f"{PACKAGE} has no room named {room}", f"move it into a room, or give it a line in ROOMS of {TABLE}"
        return
    for item in imports:
        found = room_of(item)
        target = SHARED.get(found, found) if found else None
        if target is not None and target != room and target not in ROOMS[room]:
            allowed = ", ".join(sorted(ROOMS[room])) or f"nothing else of {PACKAGE}"
            remedy = f"move what both need into a room below, or take it as an argument ({room} may import: {allowed})"
            if target == PACKAGE:
                remedy = f"import from the room that defines it, not from the public names above ({room})"
            yield item.line, f"{room} imports {item.path}, against the direction of imports", remedy
        elif room == "solver" and item.path.split(".")[0] == "torch":
            remedy = "the solver knows numbers only: turn tensors into numpy arrays before they get there"
            yield item.line, f"solver imports {item.path}", remedy


def check_file(root: Path, path: Path) -> Iterator[Violation]:
    relative = path.relative_to(root)
    text = path.read_text(encoding="utf-8")

    if relative.parts[0] in MEASURED and (lines := len(text.splitlines())) > MAX_LINES:
        what = f"{lines} lines, more than {MAX_LINES}"
        yield Violation(str(relative), MAX_LINES + 1, what, "it is probably two files: split it")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Violation(str(relative), error.lineno or 1, f"not Python: {error.msg}", "correct the syntax")
        return

    imports = list(imports_of(tree, ".".join(relative.parent.parts)))
    room = relative.parts[1].removesuffix(".py") if relative.parts[0] == PACKAGE else None
    room = SHARED.get(room, room) if room else None
    if room is not None:
        for line, what, remedy in check_direction(room, imports):
            yield Violation(str(relative), line, what, remedy)
    if relative.parts[0] in PUBLIC_TORCH_ONLY and room != COMPAT:
        for line, name in private_names(tree, imports):
            remedy = f"use a public name, or give {PACKAGE}/{COMPAT} a function for it and call that"
            yield Violation(str(relative), line, f"private torch name {name}", remedy)
    if room is not None and room != COMPAT:
        for line, name in private_attributes(tree, imports):
            remedy = f"give {PACKAGE}/{COMPAT} a function for what is torch's, a public name to what is ours"
            yield Violation(str(relative), line, f"private attribute {name}", remedy)


def check(root: Path) -> list[Violation]:
    files = [path for folder in MEASURED for path in (root / folder).rglob("*.py")]
    return sorted({violation for path in files for violation in check_file(root, path)})


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / PACKAGE).is_dir():
        print(f"{root} has no folder {PACKAGE}/: name the root of the repository", file=sys.stderr)
        return 2
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"imports: {len(violations)} violation(s)" if violations else "imports: all in order")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
