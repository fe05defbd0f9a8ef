"""A checkpoint as a folder: an index, and a subfolder, named in the index, with one safetensors file per rank.

The index is replaced atomically, after all files are on disk; until then the previous index and its files are valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch

from fxshard.errors import FileError
from fxshard.files import REMAKE, make_folder, read_bytes
from fxshard.runtime.checkpoint.blocks import local_block
from fxshard.runtime.checkpoint.index import Chunk, Index, read_index
from fxshard.runtime.checkpoint.reader import Source
from fxshard.runtime.checkpoint.safetensors_file import Piece, SafetensorsFile, write_file, writing

INDEX = "index.json"
_DATA = re.compile(r"data-[0-9a-f]{16}")


def new_folder(path: Path) -> str:
    """Creates a subfolder for the ranks' files in ``path`` and returns its name; raises FileError."""
    return make_folder(path / f"data-{secrets.token_hex(8)}").name


def rank_file(number: int) -> str:
    return f"rank-{number:05d}.safetensors"


def write_part(folder: Path, number: int, index: Index, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Writes the blocks of the ``number``-th rank to disk; returns their checksums."""
    pieces = [
        Piece(entry.key(name, chunk), entry.dtype, chunk.shape, partial(local_block, tensors[name], chunk.offset, chunk.shape))
        for name, entry in index.entries.items()
        for chunk in entry.chunks
        if chunk.file == number
    ]
    sums = write_file(folder / rank_file(number), pieces)
    sync(folder)
    return sums


def check_parts(folder: Path, ranks: int) -> None:
    """Raises FileError unless this rank sees the files of all ranks."""
    absent = [number for number in range(ranks) if not (folder / rank_file(number)).is_file()]
    if absent:
        remedy = "save to a file system that all ranks share"
        raise FileError(f"the rank that finishes cannot see the file of rank {absent[0]}", where=str(folder), remedy=remedy)


def commit_index(path: Path, index: Index) -> None:
    """Makes ``index`` the current one, then removes the files of earlier checkpoints."""
    fresh = path / f"{INDEX}.new"  # a fixed name, so that it overwrites one left by a killed process
    with writing(fresh):
        fresh.write_text(index.to_json())
    replace_file(fresh, path / INDEX)
    for other in path.iterdir():
        if _DATA.fullmatch(other.name) and other.name != index.folder:
            shutil.rmtree(other, ignore_errors=True)


def open_folder(path: Path) -> Source:
    """Opens a checkpoint's folder; raises FileError if it is damaged or not a checkpoint."""
    data = read_bytes(path / INDEX)
    index = read_index(data, str(path / INDEX))
    if not index.folder:
        raise FileError("the index names no folder", where=str(path / INDEX), remedy=REMAKE)
    folder = path / index.folder
    file = lru_cache(maxsize=None)(lambda number: SafetensorsFile(folder / rank_file(number)))

    def block(name: str, chunk: Chunk) -> torch.Tensor:
        return file(chunk.file).read(index.entries[name].key(name, chunk), chunk.crc32)

    return Source(index, block, str(path), hashlib.sha256(data).hexdigest())


def replace_file(fresh: Path, target: Path) -> None:
    """Atomically replaces ``target`` by ``fresh``, a file or folder, and syncs to disk; raises FileError."""
    sync(fresh)
    with writing(target):
        os.replace(fresh, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on disk; raises FileError if it does not exist."""
    with writing(path):
        handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems do not support it
        os.fsync(handle)
    os.close(handle)
