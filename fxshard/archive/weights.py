"""Weights in a program's file: whole tensors under the model's names, tied ones once, as memory-mapped safetensors."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fxshard.archive.container import WEIGHTS, Container
from fxshard.errors import FileError
from fxshard.files import REMAKE, Field, Readers, parse_json
from fxshard.program.sharded_program import ShardedProgram

MAX_HEADER = 2**28
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def weights_needed(program: ShardedProgram) -> dict[str, tuple[tuple[int, ...], str]]:
    """(global shape, dtype) of every parameter and buffer that the program reads, by name."""
    ends = zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True)
    return {end.name: (shape, dtype) for end, shape, dtype in ends if end.kind in ("parameter", "buffer")}


def select_weights(program: ShardedProgram, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The ``weights`` that the program reads; raises FileError if one is missing, has another shape or dtype, or is on meta."""
    found = {program.aliases.get(name, name): tensor for name, tensor in weights.items()} | dict(weights)
    out = {}
    for name, (shape, dtype) in weights_needed(program).items():
        tensor = found.get(name)
        if tensor is None:
            raise FileError(f"there is no weight {name!r} for the program", where=name, remedy="pass the model's whole state_dict")
        if (tuple(tensor.shape), str(tensor.dtype)) != (shape, dtype):
            has = f"{list(tensor.shape)} of {tensor.dtype}"
            raise FileError(f"the weight is {has}, the program needs {list(shape)} of {dtype}", where=name, remedy="export again")
        if tensor.is_meta:
            raise FileError("the weight is on meta and holds no numbers", where=name, remedy="load the model's weights, or save without")
        out[name] = tensor.detach().cpu().contiguous()
    return out


@contextmanager
def weights_file(weights: Mapping[str, torch.Tensor] | None, folder: Path) -> Iterator[Path | None]:
    """A temporary safetensors file of ``weights`` in ``folder``; None without weights."""
    if weights is None:
        yield None
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".weights.", dir=folder) as name:
            path = Path(name) / "weights.safetensors"
            safetensors.torch.save_file(_without_sharing(weights), path)
            yield path
    except OSError as error:
        raise FileError(f"cannot write the weights: {error}", where=str(folder), remedy="write to a folder with room for them") from error


def _without_sharing(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies weights that share memory with another: safetensors stores each separately."""
    seen: set[int] = set()
    out = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return out


def read_weights(container: Container) -> dict[str, torch.Tensor]:
    """Tensors by name, memory-mapped: a rank that takes its shards reads only those.

    Reads the file once, to check its hash. Raises FileError if it is damaged.
    """
    _check_hash(container)
    start, size = container.offset(WEIGHTS), container.infos[WEIGHTS].file_size
    header, length = _read_header(container, size)
    storage = torch.UntypedStorage.from_file(container.path, shared=False, nbytes=start + size)
    whole = torch.tensor([], dtype=torch.uint8).set_(storage)
    return {name: _tensor(field, whole[start + 8 + length :]) for name, field in header.items() if name != "__metadata__"}


def _check_hash(container: Container) -> None:
    digest = hashlib.sha256()
    with container.stream(WEIGHTS) as stream:
        while piece := stream.read(2**24):
            digest.update(piece)
    if digest.hexdigest() != container.listed[WEIGHTS]:
        raise FileError("the weights are damaged: their hash is not the manifest's", where=container.path, remedy=REMAKE)


def _read_header(container: Container, size: int) -> tuple[dict[str, Field], int]:
    """The descriptions of the tensors, and the length of the header."""
    where = f"{container.path}: weights"
    with container.stream(WEIGHTS) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise FileError("the weights are not safetensors", where=where, remedy=REMAKE)
        return parse_json(stream.read(length), where).entries(), length


def _tensor(field: Field, data: torch.Tensor) -> torch.Tensor:
    readers: Readers = {
        "dtype": Field.text,
        "shape": lambda f: f.tuple_of(Field.whole),
        "data_offsets": lambda f: f.tuple_of(Field.whole, 2),
    }
    name, shape, (begin, end) = field.record(readers).values()
    dtype = DTYPES.get(name)
    if dtype is None or end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= len(data):
        raise field.fail("the tensor's shape, dtype and place do not fit together")
    part: Any = data[begin:end]
    aligned = part.data_ptr() % dtype.itemsize == 0 and part.storage_offset() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype).view(shape)
