"""Checks what keeps the packages apart: the direction of imports, private torch names, and the length of files.

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


LAYERS = (
    "errors",
    "_torch_compat files collecting timeline compiled",
    "byte_sizes size_words",
    "progress text_table memory_profile mesh shapes",
    "layout graph views",
    "plans ops",
    "strategies.engine",
    "strategies.tensors disk_cache",
    "strategies.linear strategies.norms strategies.space",
    "strategies",
    "program",
    "cost archive inspect",
    "solver.problem",
    "solver.primal solver.reductions",
    "solver.bounds",
    "solver.search",
    "solver.limits",
    "solver",
    "passes.trace.functions",
    "passes.trace.rewrites",
    "passes.trace.fakes",
    "passes.trace.python_state passes.trace.repeats",
    "passes.trace",
    "passes.annotation",
    "passes.lowering",
    "passes.memory passes.after_lowering",
    "passes.planning",
    "passes",
    "runtime.groups",
    "runtime.simulate runtime.rank_graph",
    "runtime.ranks",
    "runtime.compile",
    "runtime.optim runtime.calls",
    "runtime.module",
    "runtime.backend runtime.checkpoint runtime.measure",
    "runtime",
    "pipelines",
    "api",
    "__init__",
    "strategies.oracle testing",
    "cli",
    "__main__",
)
"""The packages of fxshard/, from the bottom up: each may import itself and the layers below. A package is a folder or a file; a folder
that has no line of its own belongs to the one that holds it."""

LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages.split()}
ALONE = "solver"
"""Knows numbers only: its packages import nothing else of fxshard but ``TOOLS``, nor torch."""
TOOLS = ("compiled",)


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


def package_of(module: str) -> str | None:
    """The package of a dotted name in fxshard; "__init__" for the package's own public names, None for what no package holds."""
    parts = module.split(".")[1:]
    known = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((package for package in known if package in LAYER), None)


def imported_package(imported: Import) -> str | None:
    """The package that an import reaches into. None as well for a module that no package holds: its file is reported, once."""
    if imported.path.split(".")[0] != PACKAGE:
        return None
    return package_of(imported.path) or ("__init__" if imported.module == PACKAGE else None)


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


def check_direction(package: str, imports: list[Import]) -> Iterator[tuple[int, str, str]]:
    for item in imports:
        target = imported_package(item)
        alone = package.split(".")[0] == ALONE
        if alone and item.path.split(".")[0] == "torch":
            remedy = "the solver knows numbers only: turn tensors into numpy arrays before they get there"
            yield item.line, f"{package} imports {item.path}", remedy
        if target is None or target == package:
            continue
        if LAYER[target] >= LAYER[package] or (alone and target.split(".")[0] not in (ALONE, *TOOLS)):
            remedy = (
                f"move what both need into a package below ({package} is in layer {LAYER[package]} of {TABLE}), or take it as an argument"
            )
            if target == "__init__":
                remedy = f"import from the package that defines it, not from the public names above ({package})"
            yield item.line, f"{package} imports {item.path}, against the direction of imports", remedy


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
    ours = relative.parts[0] == PACKAGE
    package = package_of(".".join(_module(relative))) if ours else None
    if ours and package is None:
        what = f"{PACKAGE} has no package named {relative.parts[1].removesuffix('.py')}"
        yield Violation(str(relative), 1, what, f"move it into a package, or give it a place in LAYERS of {TABLE}")
    if package is not None:
        for line, what, remedy in check_direction(package, imports):
            yield Violation(str(relative), line, what, remedy)
    if relative.parts[0] in PUBLIC_TORCH_ONLY and package != COMPAT:
        for line, name in private_names(tree, imports):
            remedy = f"use a public name, or give {PACKAGE}/{COMPAT} a function for it and call that"
            yield Violation(str(relative), line, f"private torch name {name}", remedy)
    if package is not None and package != COMPAT:
        for line, name in private_attributes(tree, imports):
            remedy = f"give {PACKAGE}/{COMPAT} a function for what is torch's, a public name to what is ours"
            yield Violation(str(relative), line, f"private attribute {name}", remedy)


def _module(relative: Path) -> tuple[str, ...]:
    """The dotted name of a file; of a folder's ``__init__`` that of the folder, of the package's own "fxshard.__init__"."""
    parts = relative.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts


def check_circles(root: Path) -> Iterator[Violation]:
    """Files that import one another, at the top or anywhere else."""
    files = {".".join(_module(path.relative_to(root))): path for path in (root / PACKAGE).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        try:
            imports = imports_of(ast.parse(path.read_text(encoding="utf-8")), ".".join(path.relative_to(root).parent.parts))
        except SyntaxError:
            continue
        graph[module] = {item.path if item.path in files else item.module for item in imports} & files.keys() - {module}
    while free := [module for module, wanted in graph.items() if not wanted & graph.keys()]:
        for module in free:
            del graph[module]
    while ends := [module for module in graph if not any(module in wanted for wanted in graph.values())]:
        for module in ends:
            del graph[module]
    for module in graph:
        others = ", ".join(sorted(graph[module] & graph.keys()))
        remedy = "have one of them know the other by a Protocol, or move what both need into a file below"
        yield Violation(str(files[module].relative_to(root)), 1, f"is in a circle of imports with {others}", remedy)


def check(root: Path) -> list[Violation]:
    files = [path for folder in MEASURED for path in (root / folder).rglob("*.py")]
    return sorted({*check_circles(root), *(violation for path in files for violation in check_file(root, path))})


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
