"""Where a new process finds what was compiled for a rank: a file that names, under all that decides it, what Inductor keeps of it.

The files are data, with a digest of what is in them: Inductor's names for the code of forward and backward, and which values pass from one
to the other. The code stays in Inductor's own cache. What decides it: the lowered program with the values of its nodes, the rank's place,
groups and device, the sources of fxshard and of torch, and the settings of Inductor. Decision 0036.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxshard import plan_cache
from fxshard._torch_compat import OpOverload, pytree
from fxshard._torch_compat.inductor import Compiled, without_frames
from fxshard._torch_compat.kept_code import key_of, load_compiled, settings_of_inductor
from fxshard.errors import FileError, FxshardError
from fxshard.files import Field, atomic_file, make_folder, parse_json, read_bytes, write_json
from fxshard.planning_graph import is_getitem
from fxshard.runtime.bind import BoundProgram

log = logging.getLogger("fxshard")
VERSION = 2
NAMESPACES = ("aten", "prims", "fxshard", "_c10d_functional", "quantized_decomposed")
MODULES = ("_operator", "fxshard")
"""Whose operators and functions are code of torch and fxshard; what others do may change without a change of the graph."""


@dataclass(frozen=True)
class Kept:
    """Inductor's keys of the forward and the backward ("" for inference); the other fields as in an ``Artefact``."""

    forward: str
    backward: str
    kept_inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...] = ()


def file_for(bound: BoundProgram) -> Path | None:
    """The file of what is compiled for ``bound``; None where there is no cache, or what decides it is not all known."""
    values = _values(bound.module)
    settings = None if values is None else settings_of_inductor()
    if settings is None:
        return None
    place = (bound.size_class, bound.groups, bound.backends, bound.axes, str(bound.device))
    found = plan_cache.file_for(program=bound.program.hash, values=values, place=repr(place), settings=settings)
    return None if found is None else found.with_name(f"artefact-v{VERSION}-{found.stem.rpartition('-')[2]}.json")


def _values(module: fx.GraphModule) -> list[str] | None:
    """What a graph's text does not say of its nodes; None where it has symbols, constants, or operators of the user's."""
    found = []
    for node in module.graph.nodes:
        known = node.op in ("placeholder", "output") or is_getitem(node) or (node.op == "call_function" and _is_ours(node.target))
        parts = pytree.tree_leaves(node.meta.get("val"))
        if not known or not all(map(_is_plain, parts)):
            return None
        said = {k: v for k, v in node.meta.items() if isinstance(v, (str, bool, int)) and k not in ("stack_trace", "seq_nr")}
        found.append(f"{[(v.shape, v.stride(), v.dtype) for v in parts if isinstance(v, torch.Tensor)]} {sorted(said.items())}")
    return found


def _is_ours(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in NAMESPACES
    return (getattr(target, "__module__", None) or "").partition(".")[0] in MODULES


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def write(path: Path, kept: Kept) -> None:
    """Keeps where the code is; where that cannot be, it is said."""
    fields = {"version": VERSION, **asdict(kept)}
    try:
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_text(write_json({**fields, "digest": _digest(fields)}), encoding="utf-8")
    except FxshardError as error:
        log.warning("where the compiled code is cannot be kept for the next start: %s (%s)", error.what, path)
        return
    plan_cache.forget(path.parent, "artefact-v*.json")


def kept_of(
    forward: Any, backward: Any, kept_inputs: tuple[int, ...], numbers: tuple[int, ...], written: tuple[int, ...] = ()
) -> Kept | None:
    """What to keep of compiled halves (``backward`` None for inference); None where Inductor does not keep them."""
    keys = [key_of(forward), "" if backward is None else key_of(backward)]
    return None if keys[0] is None or keys[1] is None else Kept(keys[0], keys[1], kept_inputs, numbers, written)


def read(path: Path) -> tuple[Kept, Compiled, Compiled | None] | None:
    """What the file says, and the code of forward and backward; None where there is none, or what is there is damaged, which is said."""
    if not path.exists():
        return None
    try:
        kept = _read(parse_json(read_bytes(path), str(path)))
    except FileError as error:
        log.warning("what was compiled is not found by %s and is compiled again: %s", path, error.what)
        return None
    try:
        forward, backward = load_compiled(kept.forward), load_compiled(kept.backward) if kept.backward else None
    except Exception as error:  # Inductor's files are its own: whatever is wrong with them, it makes them anew
        log.warning("Inductor's code is not loaded and is compiled again: %s", error)
        return None
    if forward is None or (kept.backward and backward is None):
        return None  # Inductor's cache was emptied
    plan_cache.touch(path)
    return kept, without_frames(forward), None if backward is None else without_frames(backward)


def _read(root: Field) -> Kept:
    root.known(("version", "forward", "backward", "kept_inputs", "numbers", "written", "digest"))
    places = {name: root.get(name, lambda f: f.tuple_of(Field.whole)) for name in ("kept_inputs", "numbers", "written")}
    kept = Kept(root.get("forward", Field.text), root.get("backward", Field.text), **places)
    if root.get("digest", Field.text) != _digest({"version": root.get("version", Field.whole), **asdict(kept)}):
        raise root.fail("the file is not as it was written: its digest is another")
    return kept


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
