"""Compiled code in a program's file, one library for each size class, where torch's loader of compiled packages finds it.

The metadata beside each library say in plain text what a caller needs, in C++ too: how many ranks there are, which model each runs, and the
inputs and outputs in order. Nothing here runs the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fxshard._torch_compat.sizes.symbols import expression, is_symbolic
from fxshard.archive.container import COMPILED, RUNNER, Container, compiled_entry, graph_name
from fxshard.archive.sizes import LARGEST, read_guard
from fxshard.errors import FileError
from fxshard.files import REMAKE, Field, parse_json, write_json
from fxshard.program.sharded_program import ProgramSize, ShardedProgram
from fxshard.shapes import Guard, bounds_of

CPU_FLAGS = "fxshard_cpu_flags"
"""The key of the instructions of the CPU for which the code was compiled, as Linux names them, separated by spaces."""
SIZES = "fxshard_sizes"
"""The key of the dynamic sizes, a line each: the unit, then where the size is found, a dim of an input, then its name."""
PROGRAM_HASH = "fxshard_program"
TENSORS = "fxshard_tensors"
"""The key of dtype and whole sizes of each of the program's inputs, a line each: ``float32 8 -2``. -2 stands for the first dynamic size,
-3 for the second, and so on; -1 for one that is computed from them."""
WRITTEN = "fxshard_written"
"""The key of the numbers of the inputs that the code writes in place."""
AXIS_INDEX, SIZE, RANK = "axis_index", "size", "rank"
"""The kinds of inputs after those of the program: the rank's index on an axis, an int64 scalar; a dynamic size, in its unit, as a tensor of
shape [size, 0]; the rank's number on an axis, counted from 1, as a tensor of shape [number, 0]."""
GUARDS = "fxshard_guards"
"""The key of the conditions on dynamic sizes that the code takes for granted, as JSON."""
BOUNDS, CONDITIONS = "fxshard_bounds", "fxshard_conditions"
"""The keys of the same for callers that do not read expressions: a line per dynamic size, the least, the most and its name, and a line per
condition that no bound expresses, in words."""


@dataclass(frozen=True)
class CompiledModel:
    """The code of one size class: the shared ``library``, the ``calls`` that it makes through torch's operators (torch's JSON), and the
    ``metadata``. Its inputs and outputs are flat, local tensors."""

    library: bytes
    calls: bytes
    metadata: Mapping[str, str]

    def entries(self, name: str) -> dict[str, bytes]:
        contents = (self.library, self.calls, write_json(dict(sorted(self.metadata.items()))).encode())
        return {compiled_entry(name, end): data for end, data in zip(COMPILED, contents, strict=True)}

    @property
    def written(self) -> tuple[int, ...]:
        """The inputs that the code writes in place."""
        return tuple(map(int, self.metadata.get(WRITTEN, "").split()))

    @property
    def device(self) -> str:
        return self.metadata.get("AOTI_DEVICE_KEY", "cpu")


@dataclass(frozen=True)
class CompiledCode:
    """The ``models`` of a program by name, and the library by which Python runs them (``runner``)."""

    models: Mapping[str, CompiledModel]
    runner: bytes

    def entries(self) -> dict[str, bytes]:
        found = {RUNNER: self.runner}
        for name, model in self.models.items():
            found |= model.entries(name)
        return found


def model_names(program: ShardedProgram) -> dict[tuple[int, ...], str]:
    """The model that each rank runs, by coordinate."""
    names = {size_class: graph_name(number) for number, size_class in enumerate(program.modules)}
    return {coordinate: names[program.classes[coordinate]] for coordinate in program.mesh.coordinates()}


def describe(program: ShardedProgram, axes: tuple[str, ...]) -> dict[str, str]:
    """What the metadata of a model say of its program. ``axes``: those of the inputs at the end that are the rank's indices.

    Each line of inputs and outputs is ``kind layout name``, layouts as in ``S(0)R``; the name of a mutation is the input's.
    Inputs beyond the program's are those of ``AXIS_INDEX``, ``SIZE`` and ``RANK``.
    """
    mesh, names = program.mesh, model_names(program)
    tensors = zip(program.input_dtypes, program.input_shapes, strict=True)
    rows = [f"{end.kind} {layout} {end.name}" for end, layout in zip(program.inputs, program.input_layouts, strict=True)]
    rows += [f"{AXIS_INDEX} {'R' * mesh.ndim} {axis}" for axis in axes]
    rows += [f"{SIZE} {'R' * mesh.ndim} {one.name}" for one in program.sizes]
    rows += [f"{RANK} {'R' * mesh.ndim} {axis}" for axis in (mesh.axis_names if program.ranks else ())]
    ends = zip(program.outputs, program.output_layouts, strict=True)
    return {
        PROGRAM_HASH: program.hash,
        "fxshard_mesh": " ".join(f"{axis}={size}" for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)),
        "fxshard_models": " ".join(names[coordinate] for coordinate in mesh.coordinates()),
        "fxshard_inputs": "\n".join(rows),
        TENSORS: "\n".join(" ".join([d.removeprefix("torch."), *_sizes_text(program, s)]) for d, s in tensors),
        **({SIZES: "\n".join(map(_place_of, program.sizes))} if program.sizes else {}),
        "fxshard_outputs": "\n".join(f"{end.kind} {layout} {end.name}" for end, layout in ends),
    }


def _sizes_text(program: ShardedProgram, shape: tuple[Any, ...]) -> list[str]:
    dynamic = [one.unit * expression(one.value) for one in program.sizes]
    numbers = [expression(size) if is_symbolic(size) else size for size in shape]
    return [str(one) if isinstance(one, int) else str(-2 - dynamic.index(one)) if one in dynamic else "-1" for one in numbers]


def _place_of(one: ProgramSize) -> str:
    path, dim = one.places[0]
    return f"{one.unit} {dim} {path} {one.name}"


def bounds_in_words(program: ShardedProgram, guards: Iterable[Guard]) -> dict[str, str]:
    """The sizes that the code serves: the user's ranges, narrowed by the guards of the program and of the compiler (``guards``). What a
    caller would have to compute is a condition, sizes of inputs too."""
    found, rest = bounds_of((*program.guards, *guards), {one.name: one for one in program.sizes})
    rows = [f"{found[one.name].least} {found[one.name].most or LARGEST} {one.name}" for one in program.sizes]
    ends = zip(program.inputs, program.input_shapes, strict=True)
    computed = [f"dim {d} of {end.name}" for end, shape in ends for d, one in enumerate(_sizes_text(program, shape)) if one == "-1"]
    return {BOUNDS: "\n".join(rows), CONDITIONS: "\n".join([*map(str, rest), *(f"{one} follows from other sizes" for one in computed)])}


def axes_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The axes of the inputs at the end that are the rank's indices."""
    rows = [line.split(" ", 2) for line in metadata.get("fxshard_inputs", "").split("\n")]
    return tuple(row[2] for row in rows if row[0] == AXIS_INDEX and len(row) == 3)


def guards_of_code(model: CompiledModel, program: ShardedProgram, where: str = "the compiled code") -> tuple[Guard, ...]:
    """The conditions on dynamic sizes that the code takes for granted; raises FileError if they are not on those of ``program``."""
    if GUARDS not in model.metadata:
        return ()
    names, numbers = {one.name for one in program.sizes}, {(one.name, one.most or 1) for one in program.ranks}
    rows = parse_json(model.metadata[GUARDS], where).get("guards", Field.items)
    return tuple(read_guard(row, names, numbers) for row in rows)


def program_hash(container: Container) -> str | None:
    """The hash of the program for which the compiled code in a file was made; None if the file has none. Raises FileError."""
    if not container.has(RUNNER):
        return None
    entry = compiled_entry(graph_name(0), COMPILED[2])
    return parse_json(container.read(entry), f"{container.path}: {entry}").get(PROGRAM_HASH, Field.text)


def read_compiled(container: Container, program: ShardedProgram) -> CompiledCode | None:
    """The compiled code in a program's file, None if it has none; raises FileError if it is not that of ``program``."""
    if not container.has(RUNNER):
        return None
    found: dict[str, CompiledModel] = {}
    for name in sorted(set(model_names(program).values())):
        entries = [compiled_entry(name, end) for end in COMPILED]
        if not container.has(entries[0]):
            continue
        library, calls, said = map(container.read, entries)
        parse_json(calls, f"{container.path}: {entries[1]}").get("nodes", Field.items)
        where = f"{container.path}: {entries[2]}"
        metadata = {key: one.text() for key, one in parse_json(said, where).entries().items()}
        for key, want in describe(program, axes_of(metadata)).items():
            if metadata.get(key) != want:
                raise FileError(f"the compiled code is another program's: its {key} differs", where=where, remedy=REMAKE)
        if not all(one.isdecimal() and len(one) < 9 and int(one) < len(program.inputs) for one in metadata.get(WRITTEN, "").split()):
            raise FileError(f"the compiled code writes inputs {metadata[WRITTEN]!r:.40}, which there are not", where=where, remedy=REMAKE)
        found[name] = CompiledModel(library, calls, metadata)
        words = bounds_in_words(program, guards_of_code(found[name], program, where)) if program.sizes else {}
        if any(metadata.get(key) != want for key, want in words.items()):
            raise FileError("its bounds and conditions are not those of its guards", where=where, remedy=REMAKE)
    return CompiledCode(found, container.read(RUNNER))
