"""The description of a program in its file, besides plan and graphs: inputs, outputs, collectives, and the graph of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxshard.archive.sizes import FileSizes, write_guards, write_size, write_sizes
from fxshard.archive.structure import read_structure, write_structure
from fxshard.errors import PlanError
from fxshard.files import Field, Readers, parse_json, write_json
from fxshard.graph.planning_graph import INPUT_KINDS, OUTPUT_KINDS, GraphInput, GraphOutput
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_json import read_layout, read_mesh, write_mesh
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import KINDS, ProgramCollective, ShardedProgram, SizeClass, StoredModules
from fxshard.program.verify_program import verify_program

_META = ("partitioner_tag",)
"""Node metadata that is stored besides the value: whether the node belongs to the forward or the backward."""


def write_description(program: ShardedProgram, names: Mapping[SizeClass, str]) -> str:
    """JSON of everything besides plan and graphs; ``names``: the name of each size class's graph."""
    order = list(program.modules)
    p = program
    ins = list(map(_write_end, p.inputs, p.input_layouts, p.input_shapes, p.input_dtypes))
    outs = list(map(_write_end, p.outputs, p.output_layouts, p.output_shapes, p.output_dtypes))
    return write_json(
        {
            "mesh": write_mesh(p.mesh),
            "inputs": [{"node": end.node, **row} for end, row in zip(p.inputs, ins, strict=True)],
            "outputs": outs,
            "structure": {
                "inputs": write_structure(p.in_spec, "inputs", replace=False),
                "outputs": write_structure(p.out_spec, "outputs", replace=True),
            },
            "collectives": [vars(c) | {"shape": list(c.shape), "serves": [list(pair) for pair in c.serves]} for c in p.collectives],
            "classes": [{"graph": names[c], "sizes": [list(s) for s in c], "meta": _write_meta(p.modules[c])} for c in order],
            "ranks": [order.index(p.classes[coordinate]) for coordinate in p.mesh.coordinates()],
            "aliases": dict(sorted(p.aliases.items())),
            "constants": [{"name": name, "value": _write_constant(value)} for name, value in p.constants.items()],
            **({"sizes": write_sizes(p.sizes), "guards": write_guards(p.guards), "by_rank": bool(p.ranks)} if p.sizes else {}),
        }
    )


def _write_end(end: GraphInput | GraphOutput, layout: Layout, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    follows = {"follows": list(end.follows)} if isinstance(end, GraphOutput) and end.follows is not None else {}
    sizes = [write_size(size) for size in shape]
    return {"kind": end.kind, "name": end.name, "layout": str(layout), "shape": sizes, "dtype": dtype, **follows}


def _write_meta(module: fx.GraphModule) -> dict[str, dict[str, Any]]:
    kept = {n.name: {k: n.meta[k] for k in _META if isinstance(n.meta.get(k), str)} for n in module.graph.nodes}
    return {name: meta for name, meta in kept.items() if meta}


def _write_constant(value: Any) -> Any:
    """JSON has no infinities and NaN: they become ``{"float": "inf"}``."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read_constant(field: Field) -> tuple[str, Any]:
    name, value = field.record({"name": Field.text, "value": _read_value}).values()
    return name, value


def _read_value(field: Field) -> Any:
    if isinstance(field.value, dict):
        text = field.record({"float": Field.text})["float"]
        if text not in ("inf", "-inf", "nan"):
            raise field.fail(f"{text!r} is not inf, -inf or nan")
        return float(text)
    if isinstance(field.value, list):
        raise field.fail("a constant is a number, a text, a truth value or null")
    return field.value


@dataclass(frozen=True)
class Description:
    """A program's file without its graphs.

    ``fields``: fields of ``ShardedProgram``; ``graphs``: size class and node metadata by graph name; ``root``: the file's JSON, for errors.
    """

    mesh: Mesh
    fields: Mapping[str, Any]
    classes: Mapping[tuple[int, ...], SizeClass]
    graphs: Mapping[str, tuple[SizeClass, Mapping[str, Mapping[str, Any]]]]
    sizes: FileSizes
    root: Field

    def later(self, plan: ShardingPlan, read: Callable[[], Mapping[str, fx.GraphModule]], said: str) -> ShardedProgram:
        """The program, whose graphs are read by ``read`` when one of them is asked for. Then FileError is raised if they are inconsistent
        with the rest, or the hash is not the one that the file ``said``."""

        def modules() -> Mapping[SizeClass, fx.GraphModule]:
            program = self.program(plan, read())
            if program.hash != said:
                raise self.root.fail("the compiled code is another program's: its fxshard_program differs")
            return program.modules

        return self._program(plan, StoredModules([size_class for size_class, _ in self.graphs.values()], said, modules))

    def _program(self, plan: ShardingPlan, modules: Mapping[SizeClass, fx.GraphModule]) -> ShardedProgram:
        if plan.mesh != self.mesh:
            raise self.root.fail(f"the program is for mesh {self.mesh}, its plan for {plan.mesh}")
        return ShardedProgram(mesh=self.mesh, plan=plan, modules=modules, classes=self.classes, **self.fields)

    def program(self, plan: ShardingPlan, modules: Mapping[str, fx.GraphModule]) -> ShardedProgram:
        """The program; raises FileError if plan, description and graphs are inconsistent."""
        program = self._program(plan, {self.graphs[name][0]: module for name, module in modules.items()})
        known = {guard.expression for guard in program.guards}
        noted = [guard for guard in program.noted_guards() if guard.expression not in known]
        program = replace(program, guards=(*program.guards, *noted))
        for name, module in modules.items():
            _restore_meta(module, self.graphs[name][1], self.root)
        try:
            verify_program(program)
        except PlanError as error:
            raise self.root.fail(f"the program does not hold together: {error.what} ({error.where})") from None
        return program


def read_description(text: bytes, where: str) -> Description:
    """Reads the output of ``write_description``; raises FileError for anything else."""
    root = parse_json(text, where)
    mesh, by_rank = root.get("mesh", read_mesh), root.get("by_rank", Field.boolean, False)
    sizes = FileSizes(root.get("sizes", lambda f: f.items(), list[Field]()), mesh if by_rank else None)
    ends: Readers = {name: lambda f: f.tuple_of(lambda one: _read_end(one, mesh, sizes)) for name in ("inputs", "outputs")}
    parts: Readers = {
        "collectives": lambda f: f.tuple_of(lambda one: _read_collective(one, mesh)),
        "aliases": lambda f: {k: v.text() for k, v in f.entries().items()},
        "constants": lambda f: dict(map(_read_constant, f.items())),
    }
    others: Readers = {"mesh": Field.plain, "structure": _read_structures, "classes": _read_classes, "ranks": lambda f: f.items(mesh.size)}
    free: Readers = {"sizes": Field.plain, "by_rank": Field.plain, "guards": lambda f: f.tuple_of(sizes.guard)}
    said = root.record({**ends, **parts, **others}, free)
    ins, outs, graphs = said["inputs"], said["outputs"], said["classes"]
    tangents = {end.name for end in ins if end.kind == "tangent"}
    if unknown := next((name for end in outs for name in end.follows or () if name not in tangents), None):
        raise root.fail(f"a gradient follows {unknown!r}, which is no tangent")
    order = [size_class for size_class, _ in graphs.values()]
    return Description(
        mesh=mesh,
        fields={
            "inputs": tuple(GraphInput(end.node, end.kind, end.name) for end in ins),
            "outputs": tuple(GraphOutput(end.kind, end.name, end.follows) for end in outs),
            "input_layouts": tuple(end.layout for end in ins),
            "output_layouts": tuple(end.layout for end in outs),
            "input_shapes": tuple(end.shape for end in ins),
            "output_shapes": tuple(end.shape for end in outs),
            "input_dtypes": tuple(end.dtype for end in ins),
            "output_dtypes": tuple(end.dtype for end in outs),
            **said["structure"],
            **{name: said[name] for name in parts},
            "sizes": sizes.sizes,
            "ranks": sizes.ranks,
            "guards": said.get("guards", ()),
        },
        classes={coordinate: _at(order, rank) for coordinate, rank in zip(mesh.coordinates(), said["ranks"], strict=True)},
        graphs=graphs,
        sizes=sizes,
        root=root,
    )


@dataclass(frozen=True)
class _End:
    """An input or output of the program; an output has no ``node``."""

    kind: str
    name: str
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    node: str | None = None
    follows: tuple[str, ...] | None = None


def _read_end(field: Field, mesh: Mesh, sizes: FileSizes) -> _End:
    shape = field.get("shape", lambda f: f.tuple_of(sizes.read))
    layout: Readers = {"layout": lambda f: read_layout(f, mesh, shape), "shape": lambda _: shape}
    end = _End(
        **field.record(
            {"kind": Field.text, "name": Field.text, "dtype": Field.text, **layout},
            {"node": Field.text, "follows": lambda f: f.tuple_of(Field.text)},
        )
    )
    if end.kind not in (OUTPUT_KINDS if end.node is None else INPUT_KINDS):
        raise field.fail(f"unknown kind {end.kind!r}")
    return end


def _read_structures(field: Field) -> dict[str, Any]:
    inputs, outputs = field.record({"inputs": read_structure, "outputs": read_structure}).values()
    return {"in_spec": inputs, "out_spec": outputs}


def _read_collective(field: Field, mesh: Mesh) -> ProgramCollective:
    readers: Readers = {
        **dict.fromkeys(("kind", "axis", "dtype", "node"), Field.text),
        "bytes": Field.whole,
        "shape": lambda f: f.tuple_of(Field.whole),
        "serves": lambda f: f.tuple_of(_read_pair),
    }
    c = ProgramCollective(**field.record(readers))
    kinds = KINDS.values()
    if c.kind not in kinds or c.axis not in mesh.axis_names:
        remedy = f"kinds are {', '.join(kinds)}, axes {', '.join(mesh.axis_names)}"
        raise field.fail(f"there is no {c.kind!r} on axis {c.axis!r}", remedy)
    return c


def _read_pair(field: Field) -> tuple[int, int]:
    """(index of a redistribution, index of a step in it)."""
    entry, step = field.items(2)
    return entry.whole(), step.whole()


def _read_classes(field: Field) -> dict[str, tuple[SizeClass, dict[str, dict[str, Any]]]]:
    graphs: dict[str, tuple[SizeClass, dict[str, dict[str, Any]]]] = {}
    for one in field.items():
        readers: Readers = {
            "graph": Field.text,
            "sizes": lambda f: f.tuple_of(lambda level: level.tuple_of(Field.whole)),
            "meta": lambda f: {node: _read_meta(meta) for node, meta in f.entries().items()},
        }
        name, sizes, meta = one.record(readers).values()
        if name in graphs or sizes in [known for known, _ in graphs.values()]:
            raise one.fail("two size classes are the same")
        graphs[name] = sizes, meta
    return graphs


def _read_meta(field: Field) -> dict[str, Any]:
    return {k: one.text() for k, one in field.known(_META).items()}


def _at(order: list[SizeClass], rank: Field) -> SizeClass:
    if rank.whole() >= len(order):
        raise rank.fail(f"there is no size class {rank.value}")
    return order[rank.value]


def _restore_meta(module: fx.GraphModule, meta: Mapping[str, Mapping[str, Any]], root: Field) -> None:
    nodes = {n.name: n for n in module.graph.nodes}
    for name, values in meta.items():
        if name not in nodes:
            raise root.fail(f"the graph has no node {name!r}")
        nodes[name].meta.update(values)
