"""Weights in a program's file: whole tensors under the model's names, tied ones once, as memory-mapped safetensors."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fxshard.archive.container import WEIGHTS, Container, Listed
from fxshard.errors import FileError
from fxshard.files import REMAKE, Field, Readers, atomic_file, parse_json
from fxshard.program.sharded_program import ShardedProgram

MAX_HEADER = 2**28
WHOLE = "pass the model's whole state_dict"
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


def select_weights(
    program: ShardedProgram, weights: Mapping[str, torch.Tensor], file: str | None = None, remedy: str | None = None
) -> dict[str, torch.Tensor]:
    """The ``weights`` that the program reads; raises FileError if one is missing, has another shape or dtype, or is on meta.

    ``file``, ``remedy``: where they are from, and what to do instead of passing others.
    """
    found = {program.aliases.get(name, name): tensor for name, tensor in weights.items()} | dict(weights)
    out = {}
    for name, (shape, dtype) in weights_needed(program).items():
        tensor = found.get(name)
        if tensor is None:
            raise FileError(f"there is no weight {name!r} for the program", where=file or name, remedy=remedy or WHOLE)
        if (tuple(tensor.shape), str(tensor.dtype)) != (shape, dtype):
            has = f"{list(tensor.shape)} of {tensor.dtype}"
            raise FileError(
                f"the weight is {has}, the program needs {list(shape)} of {dtype}", where=file or name, remedy=remedy or "export again"
            )
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
    digest = hashlib.sha256()
    with container.stream(WEIGHTS) as stream:
        while piece := stream.read(2**24):
            digest.update(piece)
    if digest.hexdigest() != container.listed[WEIGHTS].sha256:
        raise FileError("the weights are damaged: their hash is not the manifest's", where=container.path, remedy=REMAKE)
    return _mapped(container.path, container.offset(WEIGHTS), container.infos[WEIGHTS].file_size)


def rank_file(path: str | Path, rank: int) -> Path:
    """The file beside a program with the weights of one rank: ``model.pt2.rank-00003.safetensors``."""
    return Path(f"{path}.rank-{rank:05d}.safetensors")


def write_rank_files(path: str | Path, shards: Iterable[Mapping[str, torch.Tensor]]) -> tuple[Listed, ...]:
    """Writes the weights of each rank beside the program, each atomically."""
    found = []
    for rank, tensors in enumerate(shards):
        with atomic_file(rank_file(path, rank)) as temporary:
            safetensors.torch.save_file(_without_sharing(tensors), temporary)
            found.append(Listed.of_file(temporary))
    return tuple(found)


def read_rank_file(container: Container, rank: int) -> dict[str, torch.Tensor]:
    """The weights of one rank by name, memory-mapped; raises FileError if its file is missing, damaged or another program's."""
    if not 0 <= rank < len(container.rank_files):
        what = f"the program has weights of {len(container.rank_files)} ranks in files of their own, and none of rank {rank}"
        raise FileError(what, where=container.path, remedy="name a rank of its mesh, or export with weights='per-rank'")
    listed, file = container.rank_files[rank], rank_file(container.path, rank)
    try:
        found = Listed.of_file(file)
    except OSError as error:
        remedy = "copy the files of the ranks together with the program; they keep its name"
        raise FileError(f"cannot read the weights of rank {rank}: {error.strerror}", where=str(file), remedy=remedy) from error
    if found != listed:
        what = f"the weights of rank {rank} are damaged, or another program's: size or hash is not the manifest's"
        raise FileError(what, where=str(file), remedy=REMAKE)
    return _mapped(str(file), 0, found.bytes)


def _mapped(path: str, start: int, size: int) -> dict[str, torch.Tensor]:
    """The tensors of ``size`` bytes of safetensors that begin at ``start`` in a file."""
    where = f"{path}: weights"
    with open(path, "rb") as file:
        file.seek(start)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise FileError("the weights are not safetensors", where=where, remedy=REMAKE)
        header = parse_json(file.read(length), where).entries()
    storage = torch.UntypedStorage.from_file(path, shared=False, nbytes=start + size)
    data = torch.tensor([], dtype=torch.uint8).set_(storage)[start + 8 + length :]
    fields = {name: field for name, field in header.items() if name != "__metadata__"}
    rows = {name: field.record(_TENSOR) for name, field in fields.items()}
    _check_places([row["data_offsets"] for row in rows.values()], len(data), where)
    return {name: _tensor(fields[name], row, data) for name, row in rows.items()}


_TENSOR: Readers = {
    "dtype": Field.text,
    "shape": lambda f: f.tuple_of(Field.whole),
    "data_offsets": lambda f: f.tuple_of(Field.whole, 2),
}


def _check_places(offsets: Iterable[tuple[int, int]], size: int, where: str) -> None:
    """Raises FileError unless the tensors' (first byte, byte after the last) fill ``size`` bytes without gaps and overlaps."""
    place = 0
    for begin, end in sorted(offsets):
        if begin != place:
            raise FileError(f"the weights overlap, or nothing is said of their byte {place}", where=where, remedy=REMAKE)
        place = end
    if place != size:
        raise FileError("the weights do not end where the last tensor does", where=where, remedy=REMAKE)


def _tensor(field: Field, row: Mapping[str, Any], data: torch.Tensor) -> torch.Tensor:
    name, shape, (begin, end) = row.values()
    dtype = DTYPES.get(name)
    if dtype is None or end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= len(data):
        raise field.fail("the tensor's shape, dtype and place do not fit together")
    part: Any = data[begin:end]
    aligned = part.data_ptr() % dtype.itemsize == 0 and part.storage_offset() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype).view(shape)
