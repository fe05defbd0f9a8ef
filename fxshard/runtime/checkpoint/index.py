"""The index of a checkpoint: its tensors and where their blocks are, as JSON with its own hash."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxshard.archive.weights import DTYPES
from fxshard.errors import FileError, OptionError
from fxshard.files import REMAKE, Field, parse_json, write_sealed

FORMAT, VERSION = "fxshard-checkpoint", 1
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""safetensors' name of each dtype."""
_FOLDER, _CRC = re.compile(r"data-[0-9a-f]{16}|"), re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, with ``shape`` at ``offset``, in the file of the ``file``-th rank; ``crc32`` of its bytes."""

    file: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: str = "0" * 8


@dataclass(frozen=True)
class Entry:
    """A tensor: its global shape, and the blocks that cover it; none if it is empty."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def key(self, name: str, chunk: Chunk) -> str:
        """The name of a chunk of the tensor ``name`` in its file: the tensor's, and the chunk's offset if the file has several chunks."""
        several = sum(other.file == chunk.file for other in self.chunks) > 1
        return f"{name}[{','.join(map(str, chunk.offset))}]" if several else name


@dataclass(frozen=True)
class Index:
    """Tensors by name, aliases of tied tensors, and everything else as JSON (see json_values.py).

    ``folder``: the subfolder with the ranks' files; ``ranks``: the number of files.
    """

    entries: Mapping[str, Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    ranks: int = 1

    def to_json(self) -> str:
        tensors = [
            {
                "name": name,
                "dtype": dtype_name(entry.dtype, name),
                "shape": entry.shape,
                "chunks": [[c.file, c.offset, c.shape, c.crc32] for c in entry.chunks],
            }
            for name, entry in self.entries.items()
        ]
        said = {
            "format": FORMAT,
            "version": VERSION,
            "folder": self.folder,
            "ranks": self.ranks,
            "tensors": tensors,
            "aliases": dict(self.aliases),
            "values": dict(self.values),
        }
        return write_sealed(said)


def dtype_name(dtype: torch.dtype, name: str) -> str:
    if dtype not in NAMES:
        raise OptionError(f"{name} is of {dtype}, which safetensors lacks", remedy="convert it, for example by torch.view_as_real")
    return NAMES[dtype]


def read_index(text: bytes | str, where: str) -> Index:
    """The index in ``text``; raises FileError if it is damaged, foreign, or of another version."""
    root = parse_json(text, where)
    remedy = f"save it again, or load it with the fxshard that wrote it; this one reads version {VERSION}"
    root.check_version(FORMAT, VERSION, "checkpoint", "give what fxshard.save_checkpoint wrote", remedy)
    root.known(("sha256", "format", "version", "folder", "ranks", "tensors", "aliases", "values"))
    root.check_seal("the index is damaged: its hash does not match", REMAKE)
    ranks = root.get("ranks", lambda f: f.whole(1))
    entries = dict(root.get("tensors", lambda f: f.tuple_of(lambda one: _entry(one, ranks))))
    aliases = {name: one.text() for name, one in root.get("aliases", Field.entries).items()}
    for name, target in aliases.items():
        if target not in entries:
            raise root.fail(f"{name!r} is an alias of {target!r}, which is missing")
    folder = root.get("folder", Field.text)
    if not _FOLDER.fullmatch(folder):
        raise root.fail(f"{folder!r} is not the name of a checkpoint's folder")
    return Index(entries, aliases, root.get("values", Field.entries) and root.value["values"], folder, ranks)


def _entry(one: Field, ranks: int) -> tuple[str, Entry]:
    name, dtype, shape, chunks = one.record({"name": Field.text, "dtype": Field.text, "shape": _sizes, "chunks": Field.items}).values()
    if dtype not in DTYPES:
        raise one.fail("the dtype is unknown")
    return name, Entry(DTYPES[dtype], shape, tuple(_chunk(chunk, shape, ranks) for chunk in chunks))


def _chunk(one: Field, whole: tuple[int, ...], ranks: int) -> Chunk:
    file, offset, shape, crc = one.items(4)
    chunk = Chunk(file.whole(), _sizes(offset), _sizes(shape), crc.text())
    inside = len(chunk.offset) == len(chunk.shape) == len(whole) and all(
        o + n <= size for o, n, size in zip(chunk.offset, chunk.shape, whole, strict=True)
    )
    if not inside or chunk.file >= ranks or not math.prod(chunk.shape) or not _CRC.fullmatch(chunk.crc32):
        raise one.fail("this block does not fit the tensor")
    return chunk


def _sizes(one: Field) -> tuple[int, ...]:
    return one.tuple_of(Field.whole)


def missing(name: str, where: str) -> FileError:
    return FileError(f"the checkpoint has no {name!r}", where=where, remedy="load it into the model that it was saved from")
