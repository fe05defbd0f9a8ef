"""Compiled code in a program's file, one library for each size class, where torch's loader of compiled packages finds it.

The metadata beside each library say in plain text what a caller needs, in C++ too: how many ranks there are, which model each runs, and the
inputs and outputs in order. Nothing here runs the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxshard.archive.container import COMPILED, RUNNER, Container, compiled_entry, graph_name
from fxshard.errors import FileError
from fxshard.files import REMAKE, parse_json, write_json
from fxshard.program.sharded_program import ShardedProgram

CPU_FLAGS = "fxshard_cpu_flags"
"""The key of the instructions of the CPU for which the code was compiled, as Linux names them, separated by spaces."""
WRITTEN = "fxshard_written"
"""The key of the numbers of the inputs that the code writes in place."""
AXIS_INDEX = "axis_index"
"""The kind of an input that is the rank's index on an axis: an int64 scalar."""


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
    """
    mesh, names = program.mesh, model_names(program)
    rows = [f"{end.kind} {layout} {end.name}" for end, layout in zip(program.inputs, program.input_layouts, strict=True)]
    rows += [f"{AXIS_INDEX} {'R' * mesh.ndim} {axis}" for axis in axes]
    ends = zip(program.outputs, program.output_layouts, strict=True)
    return {
        "fxshard_program": program.hash,
        "fxshard_mesh": " ".join(f"{axis}={size}" for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)),
        "fxshard_models": " ".join(names[coordinate] for coordinate in mesh.coordinates()),
        "fxshard_inputs": "\n".join(rows),
        "fxshard_outputs": "\n".join(f"{end.kind} {layout} {end.name}" for end, layout in ends),
    }


def axes_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The axes of the inputs at the end that are the rank's indices."""
    rows = [line.split(" ", 2) for line in metadata.get("fxshard_inputs", "").split("\n")]
    return tuple(row[2] for row in rows if row[0] == AXIS_INDEX and len(row) == 3)


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
        where = f"{container.path}: {entries[2]}"
        metadata = {key: one.text() for key, one in parse_json(said, where).entries().items()}
        for key, want in describe(program, axes_of(metadata)).items():
            if metadata.get(key) != want:
                raise FileError(f"the compiled code is another program's: its {key} differs", where=where, remedy=REMAKE)
        if not all(one.isdecimal() and int(one) < len(program.inputs) for one in metadata.get(WRITTEN, "").split()):
            raise FileError(f"the compiled code writes inputs {metadata[WRITTEN]!r:.40}, which there are not", where=where, remedy=REMAKE)
        found[name] = CompiledModel(library, calls, metadata)
    return CompiledCode(found, container.read(RUNNER))
