"""``fxshard inspect FILE``: a plan's or a program's file, as a screen, tables, a trace, a drawing, or JSON.

What the file says by itself is shown without torch; what needs the graph (memory over time, a program's timeline) loads it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.cli.console.commands import add_command
from fxshard.cli.html_report import add_html, check_html, write_file_report
from fxshard.errors import FileError, OptionError, printable
from fxshard.files import REMAKE, Field, atomic_file, read_bytes, read_start
from fxshard.progress import progress
from fxshard.views.plan_view import Fields, PlanView
from fxshard.views.stored import DAMAGE, read_view, stored_program

if TYPE_CHECKING:
    from fxshard.plans.sharding_plan import ShardingPlan

NEITHER = "give a plan (.json) that fxshard plan -o wrote, or a program (.pt2) that fxshard export -o wrote"
DRAWINGS = (".svg", ".dot")


@dataclass(frozen=True)
class Stored:
    """A file: a ``program`` is a zip archive, a plan a JSON object."""

    path: str
    is_program: bool

    @cached_property
    def view(self) -> PlanView:
        """What the file's plan says, by itself if fxshard wrote it; else the strict reader, which loads torch, reads it first."""
        view = read_view(self._archived.plan if self.is_program else read_bytes(self.path), self.path)
        if view is not None:
            return view
        from fxshard.plans.plan_text import view_of

        return view_of(self.plan)

    @cached_property
    def _archived(self) -> Archived:
        return _archived(self.path)

    @cached_property
    def program(self) -> Fields | None:
        """What a program's file says besides its plan; None for a plan."""
        if not self.is_program:
            return None
        said, beside = self._archived.program, self._archived.compiled
        if said["mesh"] != self.view.fields["mesh"]:
            self.check()
            raise FileError("the program and its plan are for different meshes", where=self.path, remedy=REMAKE)
        return {**stored_program(said), **beside}

    @cached_property
    def loaded(self) -> Any:
        """The live plan or program."""
        if not self.is_program:
            return self.plan
        from fxshard import archive

        return archive.load(self.path)

    def check(self) -> None:
        """Reads the file as strictly as ``fxshard.load``; raises FileError, which says what is wrong, and where."""
        assert self.loaded is not None

    @cached_property
    def plan(self) -> ShardingPlan:
        """The live plan."""
        if self.is_program:
            return self.loaded.plan
        from fxshard.plans.sharding_plan import ShardingPlan

        return ShardingPlan.load(self.path)


@dataclass(frozen=True)
class Archived:
    """What a program's archive says: its plan's text, its description, and its compiled code."""

    plan: bytes
    program: Fields
    compiled: dict[str, Any]


def _archived(path: str) -> Archived:
    """Raises FileError unless the archive holds exactly the entries of its program, as ``fxshard.load`` does."""
    from fxshard.archive.container import PLAN, PROGRAM, open_archive
    from fxshard.files import parse_json

    with open_archive(path) as archive:
        said = parse_json(archive.read(PROGRAM), f"{path}: program")
        graphs = said.get("classes", lambda f: f.tuple_of(lambda one: one.get("graph", Field.text)))
        archive.check_entries(graphs)
        axes = said.get("mesh", lambda f: f.get("axes", lambda rows: rows.tuple_of(lambda row: row.items(2)[1].whole(1))))
        archive.check_rank_files(math.prod(axes))
        return Archived(archive.read(PLAN), said.value, _compiled(archive, graphs))


def _compiled(archive: Any, graphs: Sequence[str]) -> dict[str, Any]:
    """The number of compiled models in a program's archive, and their devices; empty if it has none."""
    from fxshard.archive.container import COMPILED, compiled_entry
    from fxshard.files import parse_json

    entries = [compiled_entry(name, COMPILED[-1]) for name in graphs]
    found = [parse_json(archive.read(entry), f"{archive.path}: {entry}").entries() for entry in entries if archive.has(entry)]
    devices = sorted({said["AOTI_DEVICE_KEY"].text() if "AOTI_DEVICE_KEY" in said else "cpu" for said in found})
    return {"compiled": {"models": len(found), "devices": devices}} if found else {}


def stored(path: str) -> Stored:
    """The file, distinguished by how it begins; raises FileError if it is neither."""
    start = read_start(path, 64).lstrip()
    if not start.startswith((b"PK", b"{")):
        raise FileError("the file is neither a plan nor a program", where=path, remedy=NEITHER)
    return Stored(path, start.startswith(b"PK"))


def add_inspect(commands: Any) -> None:
    about = "show a plan or a program; needs no process group, and torch for few parts only"
    inspect = add_command(commands, "inspect", about, "fxshard inspect plan.json --collectives 'layers.0.*'")
    inspect.add_argument("file", nargs="?", help="a file written by fxshard plan or fxshard export")
    glob: dict[str, Any] = {"nargs": "?", "const": "*", "metavar": "GLOB"}
    inspect.add_argument("--nodes", **glob, help="list every node and its layouts, or those that match: nodes, parameters or modules")
    inspect.add_argument("--params", **glob, help="list every parameter with its layout and bytes, or those that match")
    collectives_help = "list every collective, its module and why it is there, or those of matching modules or values"
    inspect.add_argument("--collectives", **glob, help=collectives_help)
    inspect.add_argument("--why", action="append", type=int, default=[], metavar="N", help="say what collective N is for; may be repeated")
    inspect.add_argument(
        "--memory", action="store_true", help="the peak by kind; for a program also its largest tensors and bytes over time"
    )
    timeline_help = "list the predicted times of operators and collectives, or write them as a trace for Perfetto (ui.perfetto.dev)"
    inspect.add_argument("--timeline", nargs="?", const="", metavar="TRACE.json", help=timeline_help)
    graph_help = "print the modules and the values between them as DOT (Graphviz), or write DOT or a drawing to a file"
    inspect.add_argument("--graph", nargs="?", const="", metavar="FILE.svg|FILE.dot", help=graph_help)
    explorer = "of a program: write node data for Google's Model Explorer, OUT.time.json, OUT.layout.json and OUT.memory.json"
    inspect.add_argument("--model-explorer", metavar="OUT.json", help=explorer)
    add_html(inspect)
    inspect.add_argument("--json", action="store_true", help="print everything, or only what the other options ask for, as JSON")
    inspect.set_defaults(command=inspect_file)


def inspect_file(options: argparse.Namespace) -> None:
    """Prints the screen, or the parts that are asked for."""
    _find_file(options)
    check_html(options)
    file = stored(options.file)
    try:
        with progress(f"reading {options.file}"):
            parts = _asked(file, options)
            if options.json:
                text = json.dumps(_as_json(file, parts), indent=1)
            else:
                text = "\n\n".join(part.text() for part in parts) if parts else _screen(file)
    except DAMAGE:
        file.check()
        raise  # nothing is wrong with the file
    print(printable(text))


def _find_file(options: argparse.Namespace) -> None:
    """The file may also follow an option that takes an optional value: ``fxshard inspect --nodes plan.json``."""
    for name in ("nodes", "params", "collectives"):
        value = getattr(options, name)
        if options.file is None and value is not None and Path(value).is_file():
            options.file = value
            setattr(options, name, "*")
    if options.file is None:
        raise OptionError("no file is given", remedy="name it first: fxshard inspect plan.json")


@dataclass(frozen=True)
class Part:
    """A part that is asked for, by name, as text and as plain data."""

    name: str
    text: Callable[[], str]
    plain: Callable[[], Any]


def _asked(file: Stored, options: argparse.Namespace) -> list[Part]:
    view = file.view
    parts: list[Part] = []
    if options.nodes:
        parts.append(_nodes(view, _globs(options.nodes)))
    if options.params:
        parts.append(_params(view, _globs(options.params)))
    if options.collectives:
        parts.append(_collectives(file, _globs(options.collectives)))
    parts += [_why(file, number) for number in options.why]
    if options.memory:
        parts.append(_memory(file))
    if options.timeline is not None:
        parts.append(_timeline(file, options.timeline))
    if options.graph is not None:
        parts.append(_graph(view, options.graph))
    if options.model_explorer:
        parts.append(_model_explorer(file, options.model_explorer))
    if options.html:
        parts.append(_html(file, options.html))
    return parts


def _globs(glob: str) -> list[str]:
    return [] if glob == "*" else [glob]


def _screen(file: Stored) -> str:
    from fxshard.views.screen import screen

    return screen(file.view, file.program)


def _as_json(file: Stored, parts: Sequence[Part]) -> Any:
    if len(parts) == 1:
        return parts[0].plain()
    if parts:
        return {part.name: part.plain() for part in parts}
    if file.is_program:
        from fxshard import inspect

        return inspect.to_json(file.loaded)
    from fxshard.views.plain import plain_plan

    return plain_plan(file.view)


def _nodes(view: PlanView, globs: Sequence[str]) -> Part:
    from fxshard.views.plain import plain_plan
    from fxshard.views.tables import nodes_table

    return Part("nodes", lambda: nodes_table(view, globs), lambda: plain_plan(view, globs)["nodes"])


def _params(view: PlanView, globs: Sequence[str]) -> Part:
    from fxshard.views.plain import plain_parameters
    from fxshard.views.tables import parameters_table

    return Part("parameters", lambda: parameters_table(view, globs), lambda: plain_parameters(view, globs))


def _collectives(file: Stored, globs: Sequence[str]) -> Part:
    from fxshard.views.issued import issued_table
    from fxshard.views.plain import plain_collectives
    from fxshard.views.tables import collectives_table

    program = file.program
    if program is not None and not globs:
        return Part("collectives", lambda: issued_table(file.view, program, _width()), lambda: program["collectives"])
    return Part("collectives", lambda: collectives_table(file.view, globs, _width()), lambda: plain_collectives(file.view, globs))


def _width() -> int:
    """Characters of a line: where a program or a file reads us, nothing is cut."""
    from fxshard.views.tables import WIDE

    return WIDE if sys.stdout.isatty() else sys.maxsize


def _why(file: Stored, number: int) -> Part:
    from fxshard.errors import PlanError
    from fxshard.views.plain import plain_collective

    def text() -> str:
        try:
            return str(file.plan.why_collective(number).text(shell=True))
        except PlanError as error:
            remedy = "fxshard inspect PLAN.json --collectives lists the collectives of a plan"
            raise PlanError(error.what, where=file.path, remedy=remedy) from error

    def plain() -> Any:
        text()
        return plain_collective(file.view, file.view.collectives[number])

    return Part(f"collective {number}", text, plain)


def _memory(file: Stored) -> Part:
    from fxshard.views.tables import memory_kinds

    kinds = {"memory": dict(sorted(file.view.memory.items())), "memory_limit": file.view.memory_limit}
    if not file.is_program:
        more = "over time and tensor by tensor: fxshard plan FILE.py:FACTORY --memory with this plan's options, or the program's file"
        return Part("memory", lambda: f"{memory_kinds(file.view)}\n\n{more}", lambda: kinds)

    def profile() -> Any:
        from fxshard.runtime.rank_graph.memory import program_memory

        return program_memory(file.loaded)

    def text() -> str:
        from fxshard.inspect import memory_table

        return memory_table(profile())

    def plain() -> Any:
        found = profile()
        return {
            **kinds,
            "peak": found.peak,
            "at": found.steps[found.peak_step].name,
            "by_kind": found.by_kind(),
            "over_time": found.over_time,
        }

    return Part("memory", text, plain)


def _timeline(file: Stored, output: str) -> Part:
    from fxshard.views.timeline import plan_timeline, plan_trace, timeline_table, trace

    def made() -> Any:
        if not file.is_program:
            return plan_timeline(file.view)
        from fxshard.passes.after_lowering.schedule import predicted

        return predicted(file.loaded)

    def plain() -> Any:
        return trace(made(), list(file.view.axes)) if file.is_program else plan_trace(file.view)

    if not output:
        return Part("timeline", lambda: timeline_table(made()), plain)
    return _file_part("timeline", output, lambda: json.dumps(plain()), "open it at ui.perfetto.dev or chrome://tracing")


def _graph(view: PlanView, output: str) -> Part:
    from fxshard.views.graph import dot, module_graph, svg

    graph = module_graph(view)
    if output and not output.endswith(DRAWINGS):
        raise OptionError(f"cannot tell from {output!r} what to write", where="--graph", remedy=f"end its name in {' or '.join(DRAWINGS)}")
    if output:
        return _file_part("graph", output, lambda: svg(graph) if output.endswith(".svg") else dot(graph), "")
    plain = {"modules": graph.lines, "edges": [[*edge, said] for edge, said in graph.edges.items()]}
    return Part("graph", lambda: dot(graph), lambda: plain)


def _model_explorer(file: Stored, path: str) -> Part:
    from fxshard.cli.model_explorer import check_model_explorer, model_explorer_data, write_model_explorer

    check_model_explorer(path, is_program=file.is_program)

    def written() -> list[str]:
        return write_model_explorer(model_explorer_data(file.loaded), path)

    return Part("model_explorer", lambda: f"wrote {', '.join(written())}; give one to Model Explorer with the program's file", written)


def _html(file: Stored, path: str) -> Part:
    def written() -> str:
        write_file_report(file.path, file.loaded, path)
        return path

    return Part("html", lambda: f"wrote {written()}", written)


def _file_part(name: str, path: str, content: Callable[[], str], remark: str) -> Part:
    """A part that is written to ``path``, as text and as JSON; the JSON says the path."""

    def plain() -> str:
        _written(path, content(), remark)
        return path

    return Part(name, lambda: _written(path, content(), remark), plain)


def _written(path: str, text: str, remark: str) -> str:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return f"wrote {path}{f'; {remark}' if remark else ''}"
