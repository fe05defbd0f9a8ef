"""Files that save work in later processes: solved plans, joint graphs, keys of compiled code.

A file's name contains a digest of everything its contents depend on, including the code of fxshard, the version of torch and the user's
rules, so a change of any of these leads to another file. Several ranks and jobs may share the folder: files are written atomically, and
all writers of one file write the same contents. The first line is the digest of the text that follows, so that reading detects changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import FileError, FxshardError, OptionError
from fxshard.files import atomic_file, make_folder, read_bytes
from fxshard.layout.layouts import Layout, placement_str
from fxshard.strategies.engine.user_rules import all_user_rules

T = TypeVar("T")
log = logging.getLogger("fxshard")

SWITCH, FOLDER = "FXSHARD_CACHE", "FXSHARD_CACHE_DIR"
"""Environment variables: "0" switches the cache off; the folder of the cache."""

MAX_FILES = 200
"""Number of files of each kind in the folder; the least recently used are deleted."""

IGNORED_FIELD = "user_text"
"""The field of a constraint with the user's wording, on which no plan depends."""


def folder() -> Path | None:
    """The folder of the cache: FXSHARD_CACHE_DIR, or ``fxshard`` in the user's cache folder; None if FXSHARD_CACHE is 0."""
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
    """The file of a kind (``plan``) whose contents depend on ``asked``; None without a cache, or if ``asked`` has no text form."""
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
    """Versions of the packages that the solver computes with."""
    return {name: version(name) for name in ("numpy", "numba", "highspy")}


def read(path: Path, what: str, parse: Callable[[bytes], T]) -> T | None:
    """What ``parse`` makes of the text of a file; None if there is none, or if it is damaged or ``parse`` refuses it, which is logged.

    ``what`` is in the file, for the log: ``the plan``. ``parse`` raises FxshardError.
    """
    if not path.exists():
        return None
    try:
        digest, _, text = read_bytes(path).partition(b"\n")
        if digest != _digest(text):
            raise FileError("the file was changed after it was written: its digest does not match")
        found = parse(text)
    except FxshardError as error:
        log.warning("%s in the cache, %s, is not used and is made again: %s", what, path, error.what)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # just used: ``_evict``
    return found


def write(path: Path, what: str, form: Callable[[], str]) -> None:
    """Writes the text that ``form`` gives; if that fails, logs it."""
    try:
        text = form().encode()
        make_folder(path.parent)
        with atomic_file(path) as temporary:
            temporary.write_bytes(_digest(text) + b"\n" + text)
    except FxshardError as error:
        log.warning("%s is not kept for the next start: %s (%s); set %s to another folder, or %s=0", what, error.what, path, FOLDER, SWITCH)
        return
    _evict(path.parent, f"{path.name.partition('-')[0]}-*")


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _evict(place: Path, names: str) -> None:
    """Deletes the files of these names beyond ``MAX_FILES``."""
    with contextlib.suppress(OSError):  # another process may do the same
        found = sorted(place.glob(names), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in found[MAX_FILES:]:
            file.unlink()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of fxshard's own source, since a version number does not change with each edit."""
    package = Path(__file__).parents[0]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """``value`` as nested lists of plain values, equal for equal values; raises TypeError for a value without such a form."""
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
            *([f.name, _plain(getattr(value, f.name))] for f in dataclasses.fields(value) if f.name != IGNORED_FIELD),
        ]
    if isinstance(value, Mapping):
        return ["mapping", *sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=repr)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(map(_plain, value), key=repr)]
    if isinstance(value, Sequence):
        return [_plain(one) for one in value]
    raise TypeError(f"a {type(value).__name__} has no text form")
