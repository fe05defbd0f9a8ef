"""Arguments of calls and names of operators as JSON: what files and texts that hold graphs have in common.

``NotSerializable`` is raised for constants, subgraphs, operators and functions of the user, symbolic sizes.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import OpOverload

NAMESPACES = ("aten", "prims", "fxshard")
"""Namespaces of operators whose code is torch's or fxshard's."""
TRUSTED_LIBRARIES = ("torch", "_operator", "math", "fxshard")
"""Packages whose functions a captured graph may call."""
ENUM_NAMES: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


class NotSerializable(Exception):
    """Part of a graph cannot be written as JSON."""


def to_json(value: Any, node: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a call as JSON values; ``node`` gives the value that represents a node."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case fx.Node():
            return {"node": node(value)}
        case tuple():
            return {"tuple": [to_json(one, node) for one in value]}
        case list():
            return [to_json(one, node) for one in value]
        case slice():
            return {"slice": [to_json(one, node) for one in (value.start, value.stop, value.step)]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: to_json(one, node) for key, one in value.items()}}
        case torch.device():
            return {"device": str(value)}
        case _ if type(value) in ENUM_NAMES:
            return {ENUM_NAMES[type(value)]: str(value).removeprefix("torch.")}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
    raise NotSerializable(type(value).__name__)


def from_json(data: Any, nodes: Sequence[Any]) -> Any:
    """The inverse of ``to_json``, where a node is represented by its index in ``nodes``; raises NotSerializable, KeyError or ValueError."""
    if isinstance(data, list):
        return [from_json(one, nodes) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    match kind:
        case "node":
            return nodes[value]
        case "tuple":
            return tuple(from_json(one, nodes) for one in value)
        case "dict":
            return {key: from_json(one, nodes) for key, one in value.items()}
        case "slice":
            return slice(*(from_json(one, nodes) for one in value))
        case "float":
            return float(value)
        case "device":
            return torch.device(value)
        case "ellipsis":
            return Ellipsis
    (found,) = (word for word, name in ENUM_NAMES.items() if name == kind)
    word = getattr(torch, value)
    if not isinstance(word, found):
        raise NotSerializable(f"{value} is no {kind}")
    return word


def function_name(target: Any) -> str:
    """The qualified name of an operator or function of a trusted package; raises NotSerializable for others."""
    if isinstance(target, OpOverload):
        if target.namespace not in NAMESPACES:
            raise NotSerializable(str(target))
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if module.partition(".")[0] not in TRUSTED_LIBRARIES or getattr(sys.modules.get(module), name, None) is not target:
        raise NotSerializable(f"{module}.{name}")
    return f"{module}.{name}"


def operator_of(name: str) -> Any:
    """The operator, or ``operator.getitem``, of a name that ``function_name`` gives; raises NotSerializable for those of the user."""
    if name == GETITEM:
        return operator.getitem
    namespace, packet, overload = name.removeprefix("torch.ops.").split(".")
    if namespace not in NAMESPACES:
        raise NotSerializable(name)
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):
        raise NotSerializable(name)
    return found


GETITEM = function_name(operator.getitem)
