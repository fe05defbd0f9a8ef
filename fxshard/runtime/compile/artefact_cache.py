"""A cache on disk by which a new process finds the code that was compiled for a rank.

Each file is data: Inductor's keys of the code of forward and backward, the values that pass from one to the other, and the
guards on dynamic sizes. The code itself stays in Inductor's own cache. The file name is a hash of everything that the code depends on:
the lowered program with the metadata of its nodes, its dynamic sizes, the rank's place, groups and device, the sources of fxshard and of
torch, and the settings of Inductor. Decision 0036.
"""

from __future__ import annotations

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
from fxshard._torch_compat.inductor.code_cache import condition_of, key_of, load_compiled, settings_of_inductor
from fxshard._torch_compat.inductor.inductor import Compiled, without_frames
from fxshard._torch_compat.sizes.expressions import SIZE_CALLS
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, expression, is_symbolic
from fxshard.archive.sizes import read_guard, write_guards
from fxshard.files import Field, Readers, parse_json, write_json
from fxshard.graph.planning_graph import is_getitem
from fxshard.program.sharded_program import ProgramSize
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.shapes import Guard

log = logging.getLogger("fxshard")
WHAT = "the key of the compiled code"
NAMESPACES = ("aten", "prims", "fxshard", "_c10d_functional", "quantized_decomposed")
MODULES = ("_operator", "fxshard")
"""Namespaces and modules of torch's and fxshard's own operators and functions; the code of others may change while the graph does not."""


@dataclass(frozen=True)
class CacheEntry:
    """Inductor's keys of the forward and the backward ("" for inference). ``conditions``: for each of the two, a digest of Inductor's own
    guards, "" without any. The other fields are as in an ``Artefact``."""

    forward: str
    backward: str
    kept_inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...] = ()
    conditions: tuple[str, str] = ("", "")
    guards: tuple[Guard, ...] = ()

    def to_json(self) -> str:
        return write_json({**{one.name: getattr(self, one.name) for one in fields(self)}, "guards": write_guards(self.guards)})


def file_for(bound: BoundProgram) -> Path | None:
    """The cache file for ``bound``; None without a cache, or if the code depends on something that cannot be hashed."""
    values = _node_texts(bound.module)
    settings = None if values is None else settings_of_inductor()
    if settings is None:
        return None
    program = bound.program
    place = (bound.size_class, bound.groups, bound.backends, bound.axes, str(bound.device))
    sizes = repr([(one.name, one.unit, one.example, one.least, one.most, one.uneven) for one in program.sizes])
    guards = [guard.condition for guard in program.guards]
    asked = {"program": program.hash, "values": values, "place": repr(place), "settings": settings, "sizes": sizes, "guards": guards}
    return disk_cache.file_for("artefact", **asked)


def _node_texts(module: fx.GraphModule) -> list[str] | None:
    """For each node the metadata that the text of the graph lacks; None if the graph has data-dependent sizes, constants, or operators of
    the user's."""
    found, texts = [], dict[Any, str]()

    def text(size: Any) -> str:
        """A size as text, by ``sympy.srepr``, which includes the assumptions on its symbols."""
        if not is_symbolic(size):
            return str(size)
        expr = expression(size)
        if expr not in texts:
            texts[expr] = sympy.srepr(expr)
        return texts[expr]

    for node in module.graph.nodes:
        known = node.op in ("placeholder", "output") or is_getitem(node) or (node.op == "call_function" and _is_known_target(node.target))
        parts = pytree.tree_leaves(node.meta.get("val"))
        if not known or not all(map(_is_plain, parts)):
            return None
        said = {k: v for k, v in node.meta.items() if isinstance(v, (str, bool, int)) and k not in ("stack_trace", "seq_nr")}
        tensors = [([*map(text, v.shape)], [*map(text, v.stride())], v.dtype) for v in parts if isinstance(v, torch.Tensor)]
        found.append(f"{tensors} {[text(v) for v in parts if isinstance(v, SYMBOLIC)]} {sorted(said.items())}")
    return found


_SIZE_CALLS = frozenset(SIZE_CALLS.values())


def _is_known_target(target: Any) -> bool:
    if target in _SIZE_CALLS:
        return True
    if isinstance(target, OpOverload):
        return target.namespace in NAMESPACES
    return (getattr(target, "__module__", None) or "").partition(".")[0] in MODULES


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and all(map(_is_plain, (*value.shape, *value.stride())))
    return is_symbolic(value) or not isinstance(value, SYMBOLIC)


def write(path: Path, kept: CacheEntry) -> None:
    """Writes the cache file; warns if that fails."""
    disk_cache.write(path, WHAT, kept.to_json)


def make_cache_entry(
    forward: Any, backward: Any, kept_inputs: tuple[int, ...], numbers: tuple[int, ...], written: tuple[int, ...] = ()
) -> CacheEntry | None:
    """The cache entry of the compiled halves (``backward`` None for inference); None if Inductor does not cache them."""
    keys = [key_of(forward), "" if backward is None else key_of(backward)]
    if keys[0] is None or keys[1] is None:
        return None
    return CacheEntry(keys[0], keys[1], kept_inputs, numbers, written, (condition_of(forward), condition_of(backward)))


def read(path: Path, sizes: Sequence[ProgramSize] = ()) -> tuple[CacheEntry, Compiled, Compiled | None] | None:
    """(the cache entry, the code of forward and backward); None if there is none, or, with a warning, if the file is damaged.

    ``sizes``: the dynamic sizes of the program, which the guards name.
    """
    kept = disk_cache.read(path, WHAT, lambda text: _parse(parse_json(text, str(path)), [one.name for one in sizes]))
    if kept is None:
        return None
    try:
        forward = load_compiled(kept.forward, kept.conditions[0])
        backward = load_compiled(kept.backward, kept.conditions[1]) if kept.backward else None
    except Exception as error:  # Inductor's files are its own: whatever is wrong with them, it compiles again
        log.warning("Inductor's cached code cannot be loaded and is compiled again: %s", error)
        return None
    if forward is None or (kept.backward and backward is None):
        return None  # Inductor's cache was emptied
    return kept, without_frames(forward), None if backward is None else without_frames(backward)


def _parse(root: Field, names: Sequence[str]) -> CacheEntry:
    readers: Readers = {
        **{name: Field.text for name in ("forward", "backward")},
        **{name: lambda f: f.tuple_of(Field.whole) for name in ("kept_inputs", "numbers", "written")},
        "conditions": lambda f: f.tuple_of(Field.text, 2),
        "guards": lambda f: f.tuple_of(lambda one: read_guard(one, names)),
    }
    return CacheEntry(**root.record(readers))
