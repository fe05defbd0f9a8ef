"""A checkpoint as one safetensors file of whole tensors, which any safetensors reader can read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fxshard.errors import FileError
from fxshard.runtime.checkpoint.folder import replace_file
from fxshard.runtime.checkpoint.index import Chunk, Entry, Index, read_index
from fxshard.runtime.checkpoint.reader import Source
from fxshard.runtime.checkpoint.safetensors_file import Piece, SafetensorsFile, write_file

SUFFIX = ".safetensors"
_KEY = "fxshard"


def write_single(path: Path, fresh: Path, source: Source) -> None:
    """Writes everything in ``source`` to one file, with one tensor in memory at a time; a tied tensor under each of its names.

    Writes to ``fresh``, which then replaces ``path``.
    """
    index = source.index
    forms = {name: index.entries[index.aliases.get(name, name)] for name in (*index.entries, *index.aliases)}
    pieces = [Piece(name, e.dtype, e.shape, partial(source.whole, name)) for name, e in forms.items()]

    def metadata(sums: Mapping[str, str]) -> dict[str, str]:
        entries = {name: Entry(e.dtype, e.shape, _one(e, sums[name])) for name, e in forms.items()}
        return {_KEY: replace(index, entries=entries, folder="", aliases={}).to_json()}

    write_file(fresh, pieces, metadata)
    replace_file(fresh, path)


def _one(entry: Entry, crc32: str) -> tuple[Chunk, ...]:
    return (Chunk(0, (0,) * len(entry.shape), entry.shape, crc32),) if 0 not in entry.shape else ()


def open_single(path: Path) -> Source:
    """Opens a checkpoint's file, or any other safetensors file as a model without checksums."""
    file = SafetensorsFile(path)
    if _KEY not in file.metadata:
        entries = {}
        for name in file.names:
            dtype, shape = file.dtype_and_shape(name)
            entries[name] = Entry(dtype, shape, _one(Entry(dtype, shape, ()), ""))
        identity = hashlib.sha256(repr(entries).encode()).hexdigest()
        return Source(Index(entries), lambda name, chunk: file.read(name, None), str(path), identity)
    index = read_index(file.metadata[_KEY], str(path))
    if set(index.entries) != set(file.names):
        odd = min(set(index.entries) ^ set(file.names))
        raise FileError(f"the file and its index do not agree on {odd!r}", where=str(path), remedy="save the checkpoint again")
    identity = hashlib.sha256(file.metadata[_KEY].encode()).hexdigest()
    return Source(index, lambda name, chunk: file.read(name, chunk.crc32), str(path), identity)
