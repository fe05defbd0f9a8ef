"""Files from outside are data: strict reading of JSON, field by field, and atomic writing, which leaves a whole file or none.

msgspec and pydantic accept a field that occurs twice, and do not say where checks between fields fail: decision 0043.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fxshard.errors import FileError, closest

T = TypeVar("T")
MAX_PARSED = 2**29
"""Bytes of memory that a JSON text may take once it is parsed, as ``_parsed_bytes`` estimates it before: some 40 MB of text."""
_BYTES_OF = {"{": 140, "[": 80, ",": 30, '"': 15}
"""Upper estimates of the bytes that an object, a list, a further entry and half a text take in CPython."""
REMAKE = "make the file again, or copy it again from its source"
LARGEST, LARGEST_FIGURE = 2**63 - 1, 1e100
"""The largest whole number that is read unless a field says otherwise, and the largest time, rate or price: sums and products of some of
these are still finite."""


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary file beside ``path``. When the block ends without an error, flushes it to disk and moves it to ``path``.

    Raises FileError when the folder cannot be written.
    """
    target = Path(path)
    temporary = _temporary(target)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        os.chmod(temporary, mode)  # safetensors puts a file of its own there, which only its owner may read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"cannot write the file: {_reason(error)}", where=str(path), remedy="choose a writable folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: str | Path) -> None:
    """Raises FileError where ``atomic_file`` would: to call before long work whose result is to be written."""
    _temporary(Path(path)).unlink()


def make_folder(path: str | Path) -> Path:
    """The folder ``path``, made if it does not exist; raises FileError if it cannot be made or files cannot be written in it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        remedy = "name a folder that exists, or one that can be made"
        raise FileError(f"cannot make the folder: {_reason(error)}", where=str(folder), remedy=remedy) from error
    check_writable(folder / "file")
    return folder


def _temporary(target: Path) -> Path:
    """An empty file beside ``target`` with the permissions that a new file would have."""
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
    except (OSError, ValueError) as error:
        remedy = "name a file in a folder that exists and can be written"
        raise FileError(f"cannot write the file: {_reason(error)}", where=str(target), remedy=remedy) from error
    return Path(name)


def read_bytes(path: str | Path) -> bytes:
    """All of a file; raises FileError when it cannot be read."""
    return read_start(path, -1)


def read_start(path: str | Path, count: int) -> bytes:
    """The first ``count`` bytes of a file (-1: all); raises FileError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read the file: {_reason(error)}", where=str(path), remedy="check the path and its permissions") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write_json(fields: Mapping[str, Any]) -> str:
    """A JSON object, one field a line; an entry of a list of objects has a line of its own. Raises ValueError on NaN and infinity."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in fields.items()) + "\n}\n"


SEAL = "sha256"
"""The field with the hash of the others, of a file that says whether it was changed after it was written."""


def write_sealed(fields: Mapping[str, Any]) -> str:
    """``write_json`` with one more line, the first field: the SHA-256 of the text without this line."""
    text = write_json(fields)
    return f'{{\n"{SEAL}": "{digest(text)}",\n{text[2:]}'


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(f" {json.dumps(one, allow_nan=False)}" for one in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def parse_json(text: str | bytes, where: str, remedy: str = REMAKE, most: int | None = None) -> Field:
    """The JSON value in ``text`` as a Field; raises FileError on what is not JSON, cut short, or ambiguous.

    ``remedy``: the remedy of errors for which no more specific one is known. ``most``: bytes of memory in place of ``MAX_PARSED``.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        if text[:2] == b"PK":
            raise FileError("the file is a zip, not JSON", where=where, remedy="read a program's file with fxshard.load(path)") from error
        raise FileError(f"the file is not text: byte {error.start} is not UTF-8", where=where, remedy=remedy) from error
    check_parsed_size(decoded, where, remedy, most)
    try:
        value = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        if "\\ud" in decoded.lower():  # half a character, which nothing can write again
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        cut = error.pos >= len(decoded.rstrip()) or error.msg.startswith("Unterminated string")
        what = "the file is cut short" if cut else f"the file is not JSON: {error.msg}"
        raise FileError(what, where=f"{where}, line {error.lineno} column {error.colno}", remedy=remedy) from error
    except RecursionError as error:
        raise FileError("the file nests too deeply", where=where, remedy=remedy) from error
    except ValueError as error:
        raise FileError(f"the file is not readable JSON: {error}", where=where, remedy=remedy) from error
    return Field(value, where, "", remedy)


def check_parsed_size(text: str, where: str, remedy: str = REMAKE, most: int | None = None) -> None:
    """Raises FileError for JSON that ``parse_json`` would not read because of the memory that its values take."""
    if (parsed := _parsed_bytes(text)) > (MAX_PARSED if most is None else most):
        raise FileError(f"the file is absurdly large: read, it would take {parsed / 2**30:.1f} GiB of memory", where=where, remedy=remedy)


def _parsed_bytes(text: str) -> int:
    return len(text) * (1 if text.isascii() else 4) + sum(text.count(mark) * size for mark, size in _BYTES_OF.items())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the field {next(k for k in keys if keys.count(k) > 1)!r} occurs twice in one object")
    return out


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


_TYPES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
_TYPES |= {bool: "true or false", type(None): "null"}
_NONE: Any = object()


@dataclass(frozen=True)
class Field:
    """A value in a JSON file, with the file's name and the value's path in it, so that errors can say where."""

    value: Any
    file: str
    path: str
    remedy: str = REMAKE

    def fail(self, what: str, remedy: str | None = None) -> FileError:
        """An error about this field, for the caller to raise."""
        return FileError(what, where=f"{self.file}: {self.path}" if self.path else self.file, remedy=remedy or self.remedy)

    def _typed(self, kind: type[T]) -> T:
        if type(self.value) is not kind:
            found = _TYPES.get(type(self.value), type(self.value).__name__)
            raise self.fail(f"expected {_TYPES[kind]}, found {found}", "correct this field, or make the file again")
        return self.value

    def plain(self) -> Any:
        return self.value

    def text(self) -> str:
        return self._typed(str)

    def boolean(self) -> bool:
        return self._typed(bool)

    def whole(self, least: int = 0, most: int = LARGEST) -> int:
        """A whole number of at least ``least`` and at most ``most``."""
        number = self._typed(int)
        if not least <= number <= most:
            limit = f"at least {least}" if number < least else f"at most {most}"
            raise self.fail(f"expected a whole number of {limit}, found {str(number)[:40]}", "correct this field, or make the file again")
        return number

    def number(self, least: float = -math.inf) -> float:
        """A finite number of at least ``least``."""
        value = self.value if type(self.value) in (int, float) else self._typed(float)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fail("the number is not finite", "correct this field, or make the file again")
        if number < least:
            raise self.fail(f"expected a number of at least {least:g}, found {number}", "correct this field, or make the file again")
        return number

    def figure(self, least: float = 0.0) -> float:
        """A time, a rate, a price or a part: a number of at least ``least``, with which one can compute without an overflow."""
        figure = self.number(least)
        if abs(figure) > LARGEST_FIGURE:
            raise self.fail(f"no figure is as large as {figure}", "correct this field, or make the file again")
        return figure

    def items(self, length: int | None = None) -> list[Field]:
        """The entries of a list, of the given length where one is given."""
        values = self._typed(list)
        if length is not None and len(values) != length:
            raise self.fail(f"expected {length} entries, found {len(values)}", "correct this field, or make the file again")
        return [Field(v, self.file, f"{self.path}[{i}]", self.remedy) for i, v in enumerate(values)]

    def entries(self) -> dict[str, Field]:
        """The fields of an object with arbitrary names."""
        return {name: self._entry(name) for name in self._typed(dict)}

    def _entry(self, name: str) -> Field:
        return Field(self.value[name], self.file, f"{self.path}.{name}" if self.path else name, self.remedy)

    def known(self, names: Collection[str]) -> dict[str, Field]:
        """The fields of an object; raises FileError if one is not among ``names``."""
        fields = self.entries()
        for name in fields:
            if name not in names:
                raise self.fail(f"unknown field {name!r}{closest(name, names)}", f"the fields here are {', '.join(names)}")
        return fields

    def get(self, name: str, read: Callable[[Field], T], default: T = _NONE) -> T:
        """Field ``name`` of an object, read by ``read``; a missing one is an error unless there is a default."""
        if name in self._typed(dict):
            return read(self._entry(name))
        if default is _NONE:
            raise self.fail(f"the field {name!r} is missing")
        return default

    def check_version(self, format: str, version: int, noun: str, foreign: str, unknown: str) -> None:
        """Refuses a file of another format or version. ``noun``: what the file is; ``foreign``, ``unknown``: the remedies."""
        if not isinstance(self.value, dict) or self.value.get("format") != format:
            raise self.fail(f"the file is not a fxshard {noun}", foreign)
        found = self.get("version", Field.whole)
        if found != version:
            whose = "a newer" if found > version else "an older"
            raise self.fail(f"the {noun} has format version {found}: {whose} fxshard wrote it", unknown)

    def check_seal(self, what: str, remedy: str, text: bytes = b"") -> None:
        """Raises FileError with ``what`` unless the object's hash, which ``write_sealed`` wrote, is that of its other fields.

        ``text``: the file's, where it is known; if nobody has reformatted it, its hash is found without writing the fields again.
        """
        start, line, rest = (*text.split(b"\n", 2), b"", b"")[:3]
        written = hashlib.sha256(b"{\n" + rest).hexdigest()
        if start == b"{" and line == f'"{SEAL}": "{written}",'.encode():
            return
        others = {name: value for name, value in self._typed(dict).items() if name != SEAL}
        try:
            same = self.get(SEAL, Field.text) == digest(write_json(others))
        except RecursionError as error:
            raise self.fail("the file nests too deeply") from error
        if not same:
            raise self.fail(what, remedy)

    def record(self, needed: Readers, free: Readers | None = None) -> dict[str, Any]:
        """An object that has the fields ``needed``, perhaps some of ``free``, and no others, each read by its function."""
        readers = {**needed, **(free or {})}
        self.known(readers)
        return {name: self.get(name, read) for name, read in readers.items() if name in needed or name in self.value}

    def tuple_of(self, read: Callable[[Field], T], length: int | None = None) -> tuple[T, ...]:
        return tuple(read(item) for item in self.items(length))

    def optional(self, read: Callable[[Field], T]) -> T | None:
        return None if self.value is None else read(self)


Readers = Mapping[str, Callable[[Field], Any]]
