"""Collects the state of a training run, as named tensors and JSON, and restores it.

Parameters and buffers keep the model's names. ``optimizer/<parameter>/<key>`` belongs to an optimiser, ``random/<n>/<device>`` is the
generator state of the n-th rank, ``extra/...`` belongs to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch_compat.dtensor.rules import wrap_like
from fxshard.errors import FileError, OptionError, a_kind
from fxshard.runtime.checkpoint.json_values import decode, encode
from fxshard.runtime.checkpoint.reader import Source
from fxshard.runtime.optim.host_state import on_host

OPTIMIZER, GROUPS, RANDOM, EXTRA = "optimizer", "optimizer_groups", "random", "extra"
_OWN = tuple(f"{word}/" for word in (OPTIMIZER, GROUPS, RANDOM, EXTRA))
_OTHER_MODEL = "build the same model as when the checkpoint was saved"


@dataclass
class State:
    """The state of a run: ``tensors``, which may be DTensors; ``aliases``, other names of tied tensors; and ``values``, as JSON."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> State:
    """The state that all ranks share, without random numbers; raises OptionError for values that a checkpoint cannot hold."""
    state = State()
    seen: dict[int, str] = {}
    for name, tensor in model_tensors(model):
        if tensor.is_meta:
            raise OptionError(f"{name} has no memory: it is on meta", remedy="call model.to_empty(device=...) and give it values first")
        state.aliases.update({name: seen[id(tensor)]} if id(tensor) in seen else {})
        if seen.setdefault(id(tensor), name) == name:
            state.tensors[name] = tensor.detach()
    if optimizer is not None:
        named = named_state(model, optimizer)
        state.values[OPTIMIZER] = {
            "state": encode(named["state"], OPTIMIZER, state.tensors, distributed=True),
            "param_groups": encode(named["param_groups"], GROUPS, state.tensors),
        }
    state.values[EXTRA] = encode(extra, EXTRA, state.tensors)
    return state


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's ``state_dict`` with names instead of numbers, like torch's ``get_optimizer_state_dict``; takes no step."""
    state_dict, names = optimizer.state_dict(), _parameter_names(model, optimizer)
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {names[i]: one for i, one in state_dict["state"].items()}, "param_groups": groups}


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``state_dict`` by name, each as the object that the module holds, so that tied tensors are one object.

    Raises OptionError for entries that are not tensors, and for names that a checkpoint uses itself.
    """
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise OptionError(f"{name} in the model's state_dict is {a_kind(value)}", remedy="keep it in a buffer, or pass it in extra=")
        if name.startswith(_OWN):
            raise OptionError(f"a module's name begins like a checkpoint's own: {name}", remedy=f"begin no name with {', '.join(_OWN)}")
        yield name, value


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimiser's parameters, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                what = f"the optimiser has a parameter of shape {tuple(parameter.shape)} that the model does not have"
                raise OptionError(what, remedy="make the optimiser after fxshard.parallelize, from model.parameters()")
            found.append(names[id(parameter)])
    return found


def generators(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of this process's generators by device type: the CPU's and that of the model's device."""
    device = _device(model)
    found = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def _device(model: nn.Module) -> torch.device:
    return next((value.device for _, value in model_tensors(model)), torch.device("cpu"))


def check_model(model: nn.Module, source: Source) -> None:
    """Raises FileError for a tensor that only the model or only the checkpoint has, or whose shape or dtype differs."""
    have = dict(model_tensors(model))
    stored = {name for name in (*source.index.entries, *source.index.aliases) if not name.startswith(_OWN)}
    for names, what in ((set(have) - stored, "lacks"), (stored - set(have), "has, and the model lacks,")):
        if names:
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise FileError(f"the checkpoint {what} {min(names)!r}{more}", where=source.where, remedy=_OTHER_MODEL)
    for name, tensor in have.items():
        entry = source.entry(name)
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
            what = f"{name} is {entry.shape} {entry.dtype} in the checkpoint, {tuple(tensor.shape)} {tensor.dtype} in the model"
            remedy = "build the model as it was saved; to change its dtype, load first and convert afterwards"
            raise FileError(what, where=source.where, remedy=remedy)
        if tensor.is_meta:
            raise OptionError(f"{name} has no memory: it is on meta", remedy="call model.to_empty(device=...) before loading")


def restore_model(model: nn.Module, source: Source) -> None:
    """Copies the checkpoint's values into the model's tensors, once for tied ones."""
    for name, tensor in {id(t): (n, t) for n, t in reversed(list(model_tensors(model)))}.values():
        source.fill(tensor, name)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, source: Source) -> dict[str, Any]:
    """The argument for ``optimizer.load_state_dict``, each tensor laid out like its parameter; raises FileError if groups differ."""
    values = source.index.values.get(OPTIMIZER)
    if values is None:
        raise FileError("the checkpoint has no optimiser's state", where=source.where, remedy="load it without optimizer=")
    names = _parameter_names(model, optimizer)
    parameters = dict(model.named_parameters())
    groups = decode(_get(values, "param_groups", list, source), source.whole, source.where)
    _check_groups(optimizer, names, groups, source)
    stored = _get(values, "state", dict, source)
    state = {}
    for number, name in enumerate(names):
        if (held := stored.get(name, stored.get(source.index.aliases.get(name, name)))) is not None:
            state[number] = decode(held, _reader_like(parameters[name], source), source.where)
            if not isinstance(state[number], dict):
                what = f"the optimiser's state of {name!r} is not a table"
                raise FileError(what, where=source.where, remedy="save the checkpoint again")
    numbers = {name: number for number, name in enumerate(names)}
    renamed = [{**group, "params": [numbers[n] for n in own]} for group, own in _zip_groups(optimizer, names, groups)]
    return {"state": state, "param_groups": renamed}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: Source) -> None:
    """Gives ``optimizer`` a state from ``optimizer_state``; raises FileError if it cannot take it."""
    try:
        optimizer.load_state_dict(state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        what = f"{type(optimizer).__name__} cannot take the state in the checkpoint: {error}"
        raise FileError(what, where=source.where, remedy="load it into the optimiser that it was saved from, or save it again") from error


def _get(values: Any, key: str, kind: type, source: Source) -> Any:
    held = values.get(key) if isinstance(values, dict) else None
    if not isinstance(held, kind):
        raise FileError(f"the optimiser's state is incomplete: it has no {key}", where=source.where, remedy="save the checkpoint again")
    return held


def _zip_groups(optimizer: torch.optim.Optimizer, names: Sequence[str], groups: Sequence[Any]) -> Iterator[tuple[Any, list[str]]]:
    """Each saved group with the parameter names of the present group."""
    rest = iter(names)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        yield saved, [next(rest) for _ in group["params"]]


def _check_groups(optimizer: torch.optim.Optimizer, names: Sequence[str], groups: Sequence[Any], source: Source) -> None:
    remedy = "make the optimiser with the groups of parameters that it was saved with"
    if len(groups) != len(optimizer.param_groups):
        what = f"the optimiser has {len(optimizer.param_groups)} groups of parameters, in the checkpoint it has {len(groups)}"
        raise FileError(what, where=source.where, remedy=remedy)
    for number, (saved, own) in enumerate(_zip_groups(optimizer, names, groups)):
        listed = saved.get("params") if isinstance(saved, Mapping) else None
        other = sorted(set(own) ^ set(listed if isinstance(listed, list) else []))
        if other:
            raise FileError(
                f"group {number} of the optimiser differs from the checkpoint's in {other[0]!r}", where=source.where, remedy=remedy
            )


def _reader_like(parameter: torch.Tensor, source: Source) -> Callable[[str], torch.Tensor]:
    """A function that reads state of ``parameter``: in the parameter's layout if it has its shape, else replicated.

    A step count is a plain tensor, as torch's optimisers keep it. State that the plan holds on the host is there.
    """

    def read(name: str) -> torch.Tensor:
        shape = source.entry(name).shape
        alike = shape == tuple(parameter.shape)
        if not isinstance(parameter, DTensor) or name.endswith("/step") or not (alike or shape):
            return source.whole(name)
        mesh = parameter.device_mesh
        placements = tuple(parameter.placements) if alike else (Replicate(),) * mesh.ndim
        local = source.shard(name, mesh, placements)
        if alike and on_host(parameter) is not None:
            return wrap_like(local, parameter)
        local = local.to(parameter.device)
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)

    return read


def restore_generators(model: nn.Module, source: Source, position: int, ranks: int) -> None:
    """Restores this rank's own state if the same number of ranks saved, else that of the first rank."""
    device = _device(model)
    number = position if source.index.ranks == ranks else 0
    for kind in {"cpu", device.type}:
        name = f"{RANDOM}/{number}/{kind}"
        if name in source.index.entries:
            state = source.whole(name)
            try:
                torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(device).set_rng_state(state, device)
            except (RuntimeError, TypeError) as error:
                raise FileError(
                    f"{name} is not the state of a generator: {error}", where=source.where, remedy="save the checkpoint again"
                ) from error
