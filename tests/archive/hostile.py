"""Rewrites the archive of a program: replaces or adds entries, and lists them in the manifest with the right hashes."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = "archive/"
MANIFEST = "extra/fxshard/manifest.json"


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.removeprefix(ROOT): archive.read(name) for name in archive.namelist()}


def pack(path: Path, data: Mapping[str, bytes], *, vouch: bool = True, root: str = ROOT, compression: int = zipfile.ZIP_STORED) -> Path:
    """Writes ``data`` as an archive. ``vouch``: the manifest lists all entries with the right hashes."""
    data = dict(data)
    if vouch:
        manifest = json.loads(data[MANIFEST])
        listed = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in data.items() if n != MANIFEST}
        manifest["entries"] = [{"name": name, **facts} for name, facts in listed.items()]
        data[MANIFEST] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in data.items():
            archive.writestr(zipfile.ZipInfo(root + name), content, compress_type=compression)
    return path


def edited(path: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Rewrites the archive with one JSON entry changed in place, or replaced by what ``change`` returns."""
    data = entries(path)
    value = json.loads(data[name])
    result = change(value)
    data[name] = json.dumps(value if result is None else result).encode()
    return pack(path, data)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    found = [way]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*way, key))
    return found


def put(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """``value`` with the element at ``way`` replaced by ``new``, or removed if ``new`` is Ellipsis."""
    if not way:
        return None if new is ... else new
    place = value
    for key in way[:-1]:
        place = place[key]
    if new is ...:
        del place[way[-1]]
    else:
        place[way[-1]] = new
    return value
