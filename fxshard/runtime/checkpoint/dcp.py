"""Folders of torch.distributed.checkpoint: torch writes them; this module reads them without executing their content.

torch's own reader passes ``.metadata`` to ``pickle.load``, and values that are not tensors to ``torch.load(weights_only=False)``, so such a
folder can run any code. Here an unpickler that allows only the few names that torch writes reads ``.metadata`` into plain records;
everything else goes through ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fxshard.errors import FileError, OptionError
from fxshard.files import REMAKE, parse_json, read_bytes
from fxshard.runtime.checkpoint.index import Chunk, Entry, Index
from fxshard.runtime.checkpoint.json_values import encode
from fxshard.runtime.checkpoint.reader import Source

METADATA = ".metadata"
MODEL, OPTIMIZERS, OWN, VALUES = "model", ("optim", "optimizer"), "fxshard", "values"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}


class Record:
    """Stands for a torch object in ``.metadata``: its class name, and its fields or constructor arguments."""

    kind = ""

    def __init__(self, *values: Any) -> None:
        self.values: Any = values

    def __setstate__(self, state: Any) -> None:
        self.values = state

    def __hash__(self) -> int:
        return id(self)

    def get(self, name: str) -> Any:
        """A field; raises ValueError if there is none."""
        if not isinstance(self.values, dict) or name not in self.values:
            raise ValueError(f"{self.kind} has no {name}")
        return self.values[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (Record,), {"kind": name})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        known = {("torch", "Size"): tuple, ("torch.serialization", "_get_layout"): str, ("collections", "OrderedDict"): dict}
        if (module, name) in known:
            return known[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which the metadata of a checkpoint never does")


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Lets torch write ``state`` into a new folder, through collectives. Raises FileError."""
    try:
        writer = dcp.FileSystemWriter(folder, overwrite=False)
        dcp.save(dict(state), storage_writer=writer, no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        remedy = "look for the first error among all ranks"
        raise FileError(f"torch.distributed.checkpoint could not save: {error}", where=str(folder), remedy=remedy) from error


def check_dcp(path: Path, ranks: int) -> None:
    """Raises OptionError if torch cannot write a folder here."""
    if path.exists():
        what = "the path exists already, and a save in torch's format replaces nothing"
        raise OptionError(f"{what}: {path}", remedy="give each such checkpoint a path of its own")
    if dist.is_initialized() and dist.get_world_size() != ranks:
        what = f"torch.distributed.checkpoint needs all {dist.get_world_size()} ranks of the process group, the mesh has {ranks}"
        raise OptionError(what, remedy="save without format=")


def open_dcp(path: Path) -> Source:
    """Opens a folder that ``dcp.save`` wrote from ``{"model": ..., "optim": ...}`` (see ``get_state_dict``), or from a model alone."""
    where = str(path / METADATA)
    data = read_bytes(path / METADATA)
    try:
        root = _Unpickler(io.BytesIO(data)).load()
        return _Reader(path, root).source(hashlib.sha256(data).hexdigest())
    except FileError:
        raise
    except Exception as error:  # a malformed pickle can raise anything
        message = str(error) or type(error).__name__
        raise FileError(f"this is not the metadata of a checkpoint: {message}", where=where, remedy=REMAKE) from error


class _Reader:
    """Finds blocks and values by torch's names, and converts these names to those of state.py."""

    def __init__(self, path: Path, root: Any) -> None:
        if not isinstance(root, Record) or root.kind != "Metadata":
            raise ValueError(f"it is a {type(root).__name__}")
        self.path, self.held = path, root.get("state_dict_metadata")
        self.paths: Mapping[str, Any] = root.get("planner_data") or {}
        self.places: dict[tuple[str, tuple[int, ...]], Record] = {}
        for key, place in root.get("storage_data").items():
            self.places[key.get("fqn"), tuple(key.values.get("offset") or ())] = place

    def source(self, identity: str) -> Source:
        entries: dict[str, Entry] = {}
        torch_names: dict[str, str] = {}
        optimizer: dict[Any, Any] = {}
        values: dict[str, Any] = {}
        whole_model = not any(self._path(name)[0] in (MODEL, *OPTIMIZERS, OWN) for name in self.held)
        for name, form in self.held.items():
            parts = (MODEL, name) if whole_model else self._path(name)
            own = _own_name(parts)
            if isinstance(form, Record) and form.kind == "TensorStorageMetadata":
                entries[own], torch_names[own] = _entry(form), name
            elif parts == (OWN, VALUES):
                values.update(parse_json(self._load(name, ()), str(self.path)).value)
            held = {"$tensor": own} if own in entries else None
            if parts[0] in OPTIMIZERS:
                _put(optimizer, parts[1:], held or encode(self._load(name, ()), own, {}))
        if optimizer:
            groups = optimizer.get("param_groups", {})
            listed = [groups[i] for i in sorted(groups)] if isinstance(groups, dict) else groups
            values["optimizer"] = {"state": optimizer.get("state", {}), "param_groups": listed}
        ranks = sum(name.startswith("random/") and name.endswith("/cpu") for name in entries) or 1

        def block(own: str, chunk: Chunk) -> torch.Tensor:
            found = self._load(torch_names[own], chunk.offset)
            if not isinstance(found, torch.Tensor):
                raise FileError(f"{own!r} is not a tensor", where=str(self.path), remedy=REMAKE)
            return found

        return Source(Index(entries, values=values, ranks=ranks), block, str(self.path), identity)

    def _path(self, name: str) -> tuple[Any, ...]:
        return tuple(self.paths.get(name, (name,)))

    def _load(self, name: str, offset: tuple[int, ...]) -> Any:
        """A block or a value; raises FileError if it is damaged, or is not plain data."""
        place = self.places.get((name, offset))
        where = str(self.path / METADATA)
        if place is None:
            raise FileError(f"{name!r} has no block at {offset}", where=where, remedy=REMAKE)
        try:
            file = place.get("relative_path")
            if PurePosixPath(file).name != file or place.values.get("transform_descriptors"):
                raise FileError(f"{name!r} is at {file!r}, or was transformed when saved", where=where, remedy="save without transforms")
            where = str(self.path / file)
            with open(where, "rb") as stream:
                stream.seek(place.get("offset"))
                data = stream.read(place.get("length"))
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except FileError:
            raise
        except Exception as error:  # on damaged data, torch's reader can raise anything
            message = (str(error) or type(error).__name__).partition("\n")[0]
            raise FileError(f"cannot read {name!r}: {message}", where=where, remedy=REMAKE) from error


def _entry(form: Record) -> Entry:
    shape = tuple(form.get("size"))
    blocks = [(tuple(c.get("offsets")), tuple(c.get("sizes"))) for c in form.get("chunks")]
    return Entry(form.get("properties").values[0], shape, tuple(Chunk(0, offset, size) for offset, size in blocks if math.prod(size)))


def _own_name(parts: tuple[Any, ...]) -> str:
    if parts[0] in (MODEL, OWN):
        return ".".join(map(str, parts[1:]))
    if parts[0] in OPTIMIZERS and parts[1] == "state":
        return "/".join(["optimizer", *map(str, parts[2:])])
    return "/".join(["optimizer_groups", *map(str, parts[2:])])


def _put(tree: dict[Any, Any], parts: tuple[Any, ...], value: Any) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
    tree[parts[-1]] = value


def dcp_state(
    model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any] | None, own: Mapping[str, torch.Tensor], values: Any
) -> dict[str, Any]:
    """The state to save: ``model`` and ``optim`` named as by torch's ``get_state_dict``, and fxshard's own entries."""
    state: dict[str, Any] = {MODEL: dict(model), OWN: {**own, VALUES: json.dumps(values)}}
    return state if optimizer is None else {**state, OPTIMIZERS[0]: dict(optimizer)}
