"""Where a new process finds what was compiled for a rank: a file that names, under all that decides it, what Inductor keeps of it.

The files are data, with a digest of what is in them: Inductor's names for the code of forward and backward, and which values pass from one
to the other; of a program with dynamic sizes also what was taken for granted of them. The code stays in Inductor's own cache. What
decides it: the lowered program with the values of its nodes, its dynamic sizes, the rank's place, groups and device, the sources of
fxshard and of torch, and the settings of Inductor. Decision 0036.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from fxshard import disk_cache
from fxshard._torch_compat import OpOverload, pytree
from fxshard._torch_compat.expressions import SIZE_CALLS
from fxshard._torch_compat.inductor.inductor import Compiled, without_frames
from fxshard._torch_compat.inductor.kept_code import condition_of, key_of, load_compiled, settings_of_inductor
from fxshard._torch_compat.symbols import SYMBOLIC, expression, is_symbolic
from fxshard.archive.sizes import read_guard, write_guards
from fxshard.errors import FileError, FxshardError
from fxshard.files import Field, atomic_file, make_folder, parse_json, read_bytes, write_json
from fxshard.graph.planning_graph import is_getitem
from fxshard.program.sharded_program import ProgramSize
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.shapes import Guard

log = logging.getLogger("fxshard")
VERSION = 3
KIND = f"artefact-v{VERSION}"
NAMESPACES = ("aten", "prims", "fxshard", "_c10d_functional", "quantized_decomposed")
MODULES = ("_operator", "fxshard")
"""Whose operators and functions are code of torch and fxshard; what others do may change without a change of the graph."""


@dataclass(frozen=True)
class Kept:
    """Inductor's keys of the forward and the backward ("" for inference), and of each a digest of the guards that Inductor keeps with
    it ("" where there are none); the other fields as in an ``Artefact``."""

    forward: str
    backward: str
    kept_inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...] = ()
    conditions: tuple[str, str] = ("", "")
    guards: tuple[Guard, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """As plain data."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**plain, "version": VERSION, "guards": write_guards(self.guards)}


def file_for(bound: BoundProgram) -> Path | None:
    """The file of what is compiled for ``bound``; None where there is no cache, or what decides it is not all known."""
    values = _values(bound.module)
    settings = None if values is None else settings_of_inductor()
    if settings is None:
        return None
    program = bound.program
    place = (bound.size_class, bound.groups, bound.backends, bound.axes, str(bound.device))
    sizes = repr([(one.name, one.unit, one.example, one.least, one.most, one.uneven) for one in program.sizes])
    guards = [guard.condition for guard in program.guards]
    asked = {"program": program.hash, "values": values, "place": repr(place), "settings": settings, "sizes": sizes, "guards": guards}
    return disk_cache.file_for(KIND, **asked)


def _values(module: fx.GraphModule) -> list[str] | None:
    """What a graph's text does not say of its nodes; None where it has sizes that only running tells, constants, or operators of the
    user's."""
    found, texts = [], dict[Any, str]()

    def text(size: Any) -> str:
        """An expression in the form of ``sympy.srepr``, with the names and what is assumed of its symbols."""
        if not is_symbolic(size):
            return str(size)
        expr = expression(size)
        if expr not in texts:
            texts[expr] = sympy.srepr(expr)
        return texts[expr]

    for node in module.graph.nodes:
        known = node.op in ("placeholder", "output") or is_getitem(node) or (node.op == "call_function" and _is_ours(node.target))
        parts = pytree.tree_leaves(node.meta.get("val"))
        if not known or not all(map(_is_plain, parts)):
            return None
        said = {k: v for k, v in node.meta.items() if isinstance(v, (str, bool, int)) and k not in ("stack_trace", "seq_nr")}
        tensors = [([*map(text, v.shape)], [*map(text, v.stride())], v.dtype) for v in parts if isinstance(v, torch.Tensor)]
        found.append(f"{tensors} {[text(v) for v in parts if isinstance(v, SYMBOLIC)]} {sorted(said.items())}")
    return found


_SIZE_CALLS = frozenset(SIZE_CALLS.values())


def _is_ours(target: Any) -> bool:
    if target in _SIZE_CALLS:
        return True
    if isinstance(target, OpOverload):
        return target.namespace in NAMESPACES
    return (getattr(target, "__module__", None) or "").partition(".")[0] in MODULES


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and all(map(_is_plain, (*value.shape, *value.stride())))
    return is_symbolic(value) or not isinstance(value, SYMBOLIC)


def write(path: Path, kept: Kept) -> None:
    """Keeps where the code is; where that cannot be, it is said."""
    try:
        said = kept.fields
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_text(write_json({**said, "digest": _digest(said)}), encoding="utf-8")
    except FxshardError as error:
        log.warning("where the compiled code is cannot be kept for the next start: %s (%s)", error.what, path)
        return
    disk_cache.forget(path.parent, "artefact-v*.json")


def kept_of(
    forward: Any, backward: Any, kept_inputs: tuple[int, ...], numbers: tuple[int, ...], written: tuple[int, ...] = ()
) -> Kept | None:
    """What to keep of compiled halves (``backward`` None for inference); None where Inductor does not keep them."""
    keys = [key_of(forward), "" if backward is None else key_of(backward)]
    if keys[0] is None or keys[1] is None:
        return None
    return Kept(keys[0], keys[1], kept_inputs, numbers, written, (condition_of(forward), condition_of(backward)))


def read(path: Path, sizes: Sequence[ProgramSize] = ()) -> tuple[Kept, Compiled, Compiled | None] | None:
    """What the file says, and the code of forward and backward; None where there is none, or what is there is damaged, which is said.

    ``sizes``: the dynamic ones of the program, of which the guards are."""
    if not path.exists():
        return None
    try:
        kept = _read(parse_json(read_bytes(path), str(path)), [one.name for one in sizes])
    except FileError as error:
        log.warning("what was compiled is not found by %s and is compiled again: %s", path, error.what)
        return None
    try:
        forward = load_compiled(kept.forward, kept.conditions[0])
        backward = load_compiled(kept.backward, kept.conditions[1]) if kept.backward else None
    except Exception as error:  # Inductor's files are its own: whatever is wrong with them, it makes them anew
        log.warning("Inductor's code is not loaded and is compiled again: %s", error)
        return None
    if forward is None or (kept.backward and backward is None):
        return None  # Inductor's cache was emptied
    disk_cache.touch(path)
    return kept, without_frames(forward), None if backward is None else without_frames(backward)


def _read(root: Field, names: Sequence[str]) -> Kept:
    root.known((*(one.name for one in fields(Kept)), "version", "digest"))
    inputs, numbers, written = (root.get(name, lambda f: f.tuple_of(Field.whole)) for name in ("kept_inputs", "numbers", "written"))
    conditions = root.get("conditions", lambda f: f.items(2))
    guards = root.get("guards", lambda f: f.tuple_of(lambda one: read_guard(one, names)))
    ends = root.get("forward", Field.text), root.get("backward", Field.text)
    kept = Kept(*ends, inputs, numbers, written, (conditions[0].text(), conditions[1].text()), guards)
    if root.get("digest", Field.text) != _digest({**kept.fields, "version": root.get("version", Field.whole)}):
        raise root.fail("the file is not as it was written: its digest is another")
    return kept


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
