"""Saves and loads a training run: the model, its optimiser, random number generators, and the user's extra values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.errors import FileError, OptionError, RunError
from fxshard.runtime.calls.options import check_choice, check_number
from fxshard.runtime.checkpoint.blocks import assign_writers, ranks_of, with_checksums
from fxshard.runtime.checkpoint.dcp import METADATA, check_dcp, dcp_state, open_dcp, write_dcp
from fxshard.runtime.checkpoint.folder import INDEX, check_parts, commit_index, new_folder, open_folder, replace_file, write_part
from fxshard.runtime.checkpoint.index import Chunk, Entry, Index
from fxshard.runtime.checkpoint.json_values import decode
from fxshard.runtime.checkpoint.reader import Source
from fxshard.runtime.checkpoint.single_file import SUFFIX, open_single, write_single
from fxshard.runtime.checkpoint.state import (
    EXTRA,
    OPTIMIZER,
    RANDOM,
    State,
    check_model,
    collect_state,
    generators,
    load_optimizer_state,
    model_tensors,
    named_state,
    optimizer_state,
    restore_generators,
    restore_model,
)
from fxshard.runtime.ranks.agreement import TIMEOUT, Group, Meeting, agree, default_group
from fxshard.runtime.ranks.launch import checksum, difference


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    format: Literal["safetensors", "dcp"] = "safetensors",
    timeout: float = TIMEOUT,
) -> None:
    """Writes a checkpoint of ``model``, parallelized or not, replacing the one at ``path``; every rank of its mesh calls this.

    The previous checkpoint stays valid until all ranks have written theirs to disk; then the new one replaces it atomically. Ranks
    communicate through the process group's store, without collectives.

    Args:
        path: a folder, in which each rank writes its own shards; or, ending in ``.safetensors``, one file of whole tensors.
        optimizer: its state is saved too, under the parameters' names.
        extra: other values, equal on all ranks, such as the position in the data or a scheduler's ``state_dict()``: numbers, strings,
            bytes, plain tensors, and lists, tuples and dicts of them.
        format: "dcp" writes a folder with ``torch.distributed.checkpoint`` (through collectives), for ``dcp.load`` of
            ``{"model": ..., "optim": ...}``; ``path`` must then be new.
        timeout: seconds to wait for another rank.

    The state of torch's CPU and device generators is saved for each rank.

    Raises:
        RunError: on all ranks if one is missing, fails to write, or has different values. FileError: this rank cannot write.
        OptionError: a checkpoint cannot hold some value.
    """
    check_number("timeout", timeout, optional=False)
    check_choice("format", format, ("safetensors", "dcp"))
    target = Path(path)
    state = collect_state(model, optimizer, extra)
    group, ranks = _group(state.tensors)
    number = ranks.index(group.rank) if group else 0
    index = _index(state, ranks, generators(model), number)
    in_place = format != "dcp" and target.suffix != SUFFIX
    parts = target if in_place else target.with_name(f".{target.name}.parts")

    def prepare(notes: Mapping[int, str]) -> str:
        _same(notes, target)
        if format == "dcp":
            check_dcp(target, len(ranks))
        elif not in_place and target.is_dir():
            raise FileError("there is a folder at the path of the file", where=str(target), remedy="name a file")
        return new_folder(parts)

    fields = _compared_fields(target, state)
    folder = _agree(group, f"save a checkpoint to {target}", lambda: json.dumps(fields), prepare, timeout)
    index = replace(index, folder=folder)

    def write() -> str:
        if format == "dcp":
            named = None if optimizer is None else named_state(model, optimizer)
            own = {name: tensor for name, tensor in state.tensors.items() if name.startswith((f"{RANDOM}/", f"{EXTRA}/"))}
            write_dcp(parts / folder, dcp_state(dict(model_tensors(model)), named, own, {EXTRA: state.values[EXTRA]}))
            return ""
        return json.dumps(write_part(parts / folder, number, index, state.tensors))

    def switch(notes: Mapping[int, str]) -> str:
        if format == "dcp":
            replace_file(parts / folder, target)
        else:
            check_parts(parts / folder, len(ranks))
            commit_index(parts, with_checksums(index, [json.loads(notes[rank]) for rank in sorted(notes)]))
        if format != "dcp" and not in_place:
            write_single(target, parts / f"whole{SUFFIX}", open_folder(parts))
        if not in_place:
            shutil.rmtree(parts, ignore_errors=True)
        return ""

    _agree(group, f"finish the checkpoint in {target}", write, switch, timeout)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    random_state: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Restores a checkpoint in place and returns the ``extra`` that was saved with it; every rank of the mesh calls this.

    The mesh and plan may differ from those at saving, or be absent: each rank reads its own shards. ``path`` is a checkpoint's folder or
    file, a folder written by ``dcp.save``, or any safetensors file with a model's weights.

    Args:
        optimizer: its state is restored too; it must have the same parameter groups as at saving.
        random_state: whether to restore torch's generators: each rank's own state if the same number of ranks saved, else that of the
            first one.
        timeout: seconds to wait for another rank.

    Raises:
        FileError: the file is damaged, foreign (nothing in it is executed), or of another model. RunError: on all ranks if one is
            missing, cannot load, or reads another checkpoint.
    """
    check_number("timeout", timeout, optional=False)
    group, ranks = _group(dict(model_tensors(model)))
    number = ranks.index(group.rank) if group else 0

    found: list[Any] = []

    def load() -> str:
        source = open_checkpoint(path)
        check_model(model, source)
        state = optimizer_state(model, optimizer, source) if optimizer is not None else None
        restore_model(model, source)
        if optimizer is not None and state is not None:
            load_optimizer_state(optimizer, state, source)
        found.append(decode(source.index.values.get(EXTRA), source.whole, source.where))
        if random_state:
            restore_generators(model, source, number, len(ranks))
        return json.dumps({"checkpoint": source.identity})

    _agree(group, f"load the checkpoint {path}", load, lambda notes: _same(notes, Path(path)), timeout)
    return found[0]


def open_checkpoint(path: str | Path) -> Source:
    """Opens the checkpoint at ``path`` for reading; raises FileError if it is not one."""
    place = Path(path)
    if place.is_file():
        return open_single(place)
    if (place / INDEX).is_file():
        return open_folder(place)
    if (place / METADATA).is_file():
        return open_dcp(place)
    what = "there is no checkpoint" if not place.exists() else "the folder holds no finished checkpoint"
    raise FileError(what, where=str(place), remedy="give what fxshard.save_checkpoint or dcp.save wrote, or a .safetensors file")


def _group(tensors: Mapping[str, torch.Tensor]) -> tuple[Group | None, tuple[int, ...]]:
    """(the group to agree with, None if alone; the ranks that take part, sorted): of the model's mesh, or all for a plain model."""
    own = ranks_of(tensors)
    group = default_group(own)
    if group is not None:
        return group, group.ranks
    if own is not None and len(own) > 1:
        raise OptionError("the ranks of this mesh are not real: the process group is torch's fake one", remedy="save in the real run")
    return None, own or (0,)


def _index(state: State, ranks: Sequence[int], own: Mapping[str, torch.Tensor], number: int) -> Index:
    """The index of everything that is written; adds this rank's generators to ``state``. Generators of one kind have states of one size."""
    entries = assign_writers(state.tensors, ranks)
    for kind, tensor in own.items():
        for other in range(len(ranks)):
            chunk = Chunk(other, (0,), tuple(tensor.shape))
            entries[f"{RANDOM}/{other}/{kind}"] = Entry(tensor.dtype, tuple(tensor.shape), (chunk,))
        state.tensors[f"{RANDOM}/{number}/{kind}"] = tensor
    return Index(entries, state.aliases, state.values, ranks=len(ranks))


def _compared_fields(path: Path, state: State) -> dict[str, str]:
    """Values that must be equal on all ranks: names, shapes, layouts, the optimiser's options, the user's values."""
    values = {"options of the optimiser": state.values.get(OPTIMIZER), "extra": state.values[EXTRA]}
    fields = {"checkpoint": str(path), **{name: json.dumps(value) for name, value in values.items()}}
    for name, tensor in state.tensors.items():
        if name.startswith(f"{RANDOM}/"):
            continue
        laid = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
        fields[f"tensor: {name}"] = f"{tuple(tensor.shape)} {tensor.dtype}{laid}"
        if name.startswith(f"{EXTRA}/"):
            fields[f"tensor: {name}"] += f" checksum {checksum(tensor)}"
    return fields


def _same(notes: Mapping[int, str], path: Path) -> str:
    """Raises RunError unless all ranks sent the same fields."""
    error = difference({rank: json.loads(note) for rank, note in notes.items()})
    if error is not None:
        raise RunError(error.what, where=str(path), remedy=error.remedy)
    return ""


def _agree(group: Group | None, topic: str, note: Callable[[], str], decide: Callable[[Mapping[int, str]], str], timeout: float) -> str:
    """What the leader decides from the notes of all ranks; an error on one rank, while it makes its note too, is raised on all."""
    try:
        text = note()
    except Exception:
        if group is None:
            raise
        with Meeting(group, topic, timeout=timeout):
            raise
    return decide({0: text}) if group is None else agree(group, topic, text, decide, timeout)
