"""Folders and names of files that save a later process work: solved plans, joint graphs, names of compiled code.

Each file is named by a digest of all that decides what is in it, the code of fxshard, the version of torch and the rules that the user
gave included: whoever changes any of these looks for another file. Several ranks and jobs may share a folder: files appear whole, and all
who write one write the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import OptionError
from fxshard.layout.layouts import Layout, placement_str
from fxshard.strategies.engine.user_rules import all_user_rules

log = logging.getLogger("fxshard")

SWITCH, FOLDER = "FXSHARD_CACHE", "FXSHARD_CACHE_DIR"
"""Environment: "0" for no cache, and where it is."""

KEPT = 200
"""Files of a kind that a folder holds; those that were not used for longest go first."""

UNIMPORTANT = "user_text"
"""The field that holds how the user put a constraint, which decides nothing."""


def folder() -> Path | None:
    """Where plans are kept: FXSHARD_CACHE_DIR, or ``fxshard`` in the user's cache folder; None where FXSHARD_CACHE is 0."""
    switch = os.environ.get(SWITCH, "1").strip().lower()
    if switch in ("0", "false", "off", "no"):
        return None
    if switch not in ("", "1", "true", "on", "yes"):
        raise OptionError(f"cannot read {SWITCH}={switch!r}", where=SWITCH, remedy="set it to 0 or 1, or leave it out")
    chosen = os.environ.get(FOLDER)
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxshard"
    except RuntimeError:  # there is no home
        return None


def file_for(kind: str, **asked: Any) -> Path | None:
    """The file of this kind (``plan-v4``) for what is asked; None where there is no cache, or something asked has no text of its own."""
    place = folder()
    if place is None:
        return None
    try:
        code = {"fxshard": code_digest(), "torch": torch.__version__, **_versions()}
        decides = {"asked": _plain(asked), "rules": all_user_rules(), "code": code}
    except (TypeError, OSError) as error:
        log.debug("no %s is looked up in the cache: %s", kind, error)
        return None
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return place / f"{kind}-{key[:40]}.json"


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    """What the solver calculates with."""
    return {name: version(name) for name in ("numpy", "numba", "highspy")}


def touch(path: Path) -> None:
    """A file of the cache was used."""
    with contextlib.suppress(OSError):
        os.utime(path)


def forget(place: Path, names: str) -> None:
    """Deletes the files of these names beyond ``KEPT``."""
    with contextlib.suppress(OSError):  # another process may do the same
        found = sorted(place.glob(names), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in found[KEPT:]:
            file.unlink()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of fxshard's own source: a version number stays the same while code is worked on."""
    package = Path(__file__).parents[0]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """``value`` as lists and plain values that are the same for equal ones; raises TypeError for what has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Layout, torch.dtype)):
        return str(value)
    if isinstance(value, Placement):
        return placement_str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__name__,
            *([f.name, _plain(getattr(value, f.name))] for f in dataclasses.fields(value) if f.name != UNIMPORTANT),
        ]
    if isinstance(value, Mapping):
        return ["mapping", *sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=repr)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(map(_plain, value), key=repr)]
    if isinstance(value, Sequence):
        return [_plain(one) for one in value]
    raise TypeError(f"a {type(value).__name__} has no text of its own")
