"""A safetensors file, written tensor by tensor, and read block by block with checksums."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from fxshard.errors import FileError
from fxshard.files import REMAKE
from fxshard.runtime.checkpoint.index import dtype_name

ALIGNMENT = 8
WRITE_REMEDY = "write to a folder with enough space and permission to write, one that all ranks reach"


Metadata = Callable[[Mapping[str, str]], Mapping[str, str]]


@dataclass(frozen=True)
class Piece:
    """A tensor to write; ``value`` is called when it is written, so that the tensors need not be in memory together."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError in the block is raised as a FileError about ``path``."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write the file: {error.strerror or error}", where=str(path), remedy=WRITE_REMEDY) from error


def write_file(path: Path, pieces: Sequence[Piece], metadata: Metadata | None = None) -> dict[str, str]:
    """Writes ``pieces`` to ``path`` and waits until they are on disk; returns the crc32 of each by name.

    ``metadata``: makes the file's metadata from those checksums; the length of the metadata must not depend on them. Raises FileError if
    writing fails.
    """
    ordered = sorted(pieces, key=lambda p: (-p.dtype.itemsize, p.name))  # so that each offset is a multiple of the item size
    sums = {p.name: "0" * 8 for p in ordered}
    with writing(path), open(path, "wb") as file:
        file.write(_header(ordered, metadata and metadata(sums)))
        for piece in ordered:
            data = raw_bytes(piece.value())
            sums[piece.name] = f"{zlib.crc32(data):08x}"
            file.write(data)
        if metadata is not None:
            file.seek(0)
            file.write(_header(ordered, metadata(sums)))
        file.flush()
        os.fsync(file.fileno())
    return sums


def _header(pieces: Sequence[Piece], metadata: Mapping[str, str] | None) -> bytes:
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": {"format": "pt", **metadata}}
    place = 0
    for piece in pieces:
        end = place + piece.dtype.itemsize * torch.Size(piece.shape).numel()
        said[piece.name] = {"dtype": dtype_name(piece.dtype, piece.name), "shape": piece.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The values in logical order, on the host."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


class SafetensorsFile:
    """A safetensors file opened for reading; raises FileError if it is missing, truncated, or foreign."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = self._try(lambda: safetensors.safe_open(str(path), framework="pt"))
        self.names: tuple[str, ...] = tuple(self.file.keys())
        self.metadata: dict[str, str] = self.file.metadata() or {}

    def read(self, name: str, crc32: str | None) -> torch.Tensor:
        """A tensor, mapped from the file; raises FileError if it is missing or its checksum does not match."""
        if name not in self.names:
            raise FileError(f"the file lacks {name!r}", where=str(self.path), remedy=REMAKE)
        tensor: torch.Tensor = self._try(lambda: self.file.get_tensor(name))
        if crc32 is not None and f"{zlib.crc32(raw_bytes(tensor)):08x}" != crc32:
            raise FileError(f"{name!r} is damaged: its checksum does not match", where=str(self.path), remedy=REMAKE)
        return tensor

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        tensor = self._try(lambda: self.file.get_tensor(name))
        return tensor.dtype, tuple(tensor.shape)

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise FileError(f"cannot read the file: {error}", where=str(self.path), remedy=REMAKE) from error
