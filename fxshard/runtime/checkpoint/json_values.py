"""Encodes nested values as JSON: the user's extra values and an optimiser's options.

Plain JSON encodes itself. Other values become an object with one key: ``$tuple``, ``$dict`` (keys that are not strings), ``$float`` (not
finite), ``$bytes`` (hexadecimal), ``$tensor`` (the name under which it is stored).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard.errors import FileError, OptionError, a_kind

_REMEDY = "use numbers, texts, bytes, None, tensors, and lists, tuples and dicts of them, as most state_dict() are"


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor], *, distributed: bool = False) -> Any:
    """``value`` as JSON; its tensors are added to ``tensors`` under names that begin with ``name``.

    Raises OptionError for unsupported types, and for a DTensor unless ``distributed``.
    """
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value, name, tensors, distributed)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": value.hex()}

    def inner(key: Any, one: Any) -> Any:
        return encode(one, f"{name}/{key}", tensors, distributed=distributed)

    if type(value) in (list, tuple):
        items = [inner(i, one) for i, one in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(key, one) for key, one in value.items()}
        return {"$dict": [[encode(key, f"{name}/key", {}), inner(key, one)] for key, one in value.items()]}
    raise OptionError(f"{name} is {a_kind(value)}, which a checkpoint cannot hold", remedy=_REMEDY)


def _keep(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor], distributed: bool) -> str:
    if isinstance(value, DTensor) and not distributed:
        raise OptionError(f"{name} is a DTensor", remedy="give it whole, by full_tensor(), or as a parameter or buffer of the model")
    if name in tensors:
        raise OptionError(f"two tensors have the name {name}", remedy="rename one of them")
    tensors[name] = value.detach()
    return name


def decode(value: Any, tensor: Callable[[str], Any], where: str) -> Any:
    """The decoded value; ``tensor`` finds a tensor by name. Raises FileError for anything that ``encode`` does not write."""

    def inner(one: Any) -> Any:
        return decode(one, tensor, where)

    if isinstance(value, list):
        return [inner(one) for one in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: inner(one) for key, one in value.items()}
    ((tag, held), *more) = value.items()
    try:
        if more:
            raise ValueError("more than one key")
        match tag, held:
            case "$tuple", list():
                return tuple(inner(one) for one in held)
            case "$dict", list():
                return {inner(key): inner(one) for key, one in held}
            case "$float", "inf" | "-inf" | "nan":
                return float(held)
            case "$bytes", str():
                return bytes.fromhex(held)
            case "$tensor", str():
                return tensor(held)
        raise ValueError("unknown")
    except (ValueError, TypeError) as error:
        raise FileError(f"a checkpoint does not hold such a value: {tag}", where=where, remedy="save the checkpoint again") from error
