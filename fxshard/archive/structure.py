"""The structure of a model's inputs and outputs (a pytree) as JSON: tuples, lists and dicts, with numbers for the tensors.

``{"tuple": [0, {"dict": [["mask", 1]]}]}`` is ``(x, {"mask": m})``. A file cannot hold the user's classes: an output of another class (a
Hugging Face ModelOutput) is stored as a dict or tuple of its parts, and this is logged. ``{"value": 3}`` is a number, text or None that the
model returns in every call; ``{"number": 0}`` is a tensor without dims that it returns as a number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from fxshard._torch_compat import pytree
from fxshard.errors import FileError
from fxshard.files import Field
from fxshard.graph.objects import LISTS, MAPPINGS, Builder, CallResultSpec, Opened, ValueSpec, call_result_spec
from fxshard.graph.planning_graph import Fixed, Number

log = logging.getLogger("fxshard")
_KEYS = (str, int)


def write_structure(spec: Any, what: str, *, replace: bool) -> Any:
    """``spec`` as plain data. A container of another class becomes a dict or tuple if ``replace``; else it raises FileError."""
    after = call_result_spec(spec)
    if after is not None:
        return _write_part(after.root, after, spec.children(), set(), what)
    leaves = iter(range(spec.num_leaves))
    return _write(spec, leaves, what, replace)


def _write_part(part: ValueSpec, after: CallResultSpec, ends: Sequence[Any], done: set[int], what: str) -> Any:
    """A part of the results that may contain objects; an object becomes a dict of those attributes that a file can hold."""
    kind = part[0]
    if kind == "tensor" and part[1] not in done:
        done.add(part[1])
        return _write(ends[part[1]], iter((part[1],)), what, True)
    if kind in ("tensor", "given"):
        remedy = "return each tensor once, and none of the arguments"
        raise FileError(f"the {what} hold a tensor twice, or an argument, which a file cannot express", remedy=remedy)
    if kind == "node":
        node = after.nodes[part[1]]
        if node is None or part[1] < len(after.before):
            what = f"the {what} are an object from the arguments, which a file cannot hold"
            raise FileError(what, remedy="give and return tensors in tuples, lists and dicts")
        items = [(k, p) for k, p in zip(node.keys, node.parts, strict=True) if node.kind in LISTS or _is_storable_part(k, p)]
        parts = [_write_part(p, after, ends, done, what) for _, p in items]
        if node.kind in LISTS:
            return {"list": parts}
        if node.kind not in MAPPINGS:
            log.warning("the program's %s hold a %s; the file stores it as a dict", what, node.kind.__name__)
        return {"dict": [[key, part] for (key, _), part in zip(items, parts, strict=True)]}
    if kind in ("tuple", "tree"):
        parts = [_write_part(p, after, ends, done, what) for p in part[-1]]
        keys = part[2] if kind == "tree" else None
        if isinstance(keys, (list, tuple)) and len(keys) == len(parts) and all(type(key) in _KEYS for key in keys):
            return {"dict": [[key, one] for key, one in zip(keys, parts, strict=True)]}
        return {"tuple": parts}
    return {"value": Builder(()).value(part)}


def _is_storable_part(key: Any, part: ValueSpec) -> bool:
    return type(key) in _KEYS and (part[0] not in ("value", "held") or (part[0] == "value" and _storable(Builder(()).value(part))))


def _write(spec: Any, leaves: Any, what: str, replace: bool) -> Any:
    if spec.is_leaf():
        return next(leaves)
    kind, keys, children = spec.type, spec.context, spec.children()
    if kind is Number:
        return {"number": next(leaves)}
    if kind is Fixed:
        if not _storable(keys):
            raise FileError(f"the {what} hold {keys!r:.60}, which a file cannot hold", remedy="return tensors, finite numbers and texts")
        return {"value": keys}
    if kind is Opened:
        kind = keys[0].kind
    if kind not in (tuple, list, dict) and not replace:
        remedy = "give tensors in tuples, lists and dicts"
        raise FileError(f"the {what} hold a {getattr(kind, '__name__', kind)}, which a file cannot hold", remedy=remedy)
    parts = [_write(child, leaves, what, replace) for child in children]
    named = isinstance(keys, (list, tuple)) and len(keys) == len(parts) > 0 and all(type(key) in _KEYS for key in keys)
    name = {tuple: "tuple", list: "list", dict: "dict"}.get(kind, "dict" if named else "tuple")
    if kind not in (tuple, list, dict):
        log.warning("the program's %s hold a %s; the file stores it as a %s", what, getattr(kind, "__name__", kind), name)
    if name == "dict" and parts and not named:
        raise FileError(f"the {what} hold a dict with keys {list(keys)[:3]}", remedy="use texts or whole numbers as keys")
    return {name: [[key, part] for key, part in zip(keys, parts, strict=True)] if name == "dict" else parts}


def read_structure(field: Field) -> Any:
    """The TreeSpec of plain data whose leaves are 0, 1, 2, ... in order; raises FileError for anything else."""
    found: list[int] = []
    skeleton = _read(field, found)
    if found != list(range(len(found))):
        raise field.fail("the structure's leaves are not numbered in order")
    return pytree.tree_structure(skeleton)


def _read(field: Field, found: list[int]) -> Any:
    if isinstance(field.value, int):
        found.append(field.whole())
        return 0
    entries = field.known(("tuple", "list", "dict", "value", "number"))
    if "value" in entries and len(entries) == 1:
        if not _storable(entries["value"].value):
            raise field.fail("a value in a structure is a number, a text or null")
        return Fixed(entries["value"].value)
    if "number" in entries and len(entries) == 1:
        found.append(entries["number"].whole())
        return Number(0)
    if len(entries) != 1:
        raise field.fail("a part of a structure is a tuple, a list or a dict")
    ((kind, value),) = entries.items()
    if kind == "dict":
        pairs = [pair.items(2) for pair in value.items()]
        return {key.value if type(key.value) is int else key.text(): _read(part, found) for key, part in pairs}
    parts = [_read(part, found) for part in value.items()]
    return tuple(parts) if kind == "tuple" else parts


def _storable(value: Any) -> bool:
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
