"""Functions of one score's place, as text: the ``mask_mod`` and ``score_mod`` of torch's ``flex_attention``.

A mask is a function of (batch, head, query, key, *tensors) -> bool, a score of (score, batch, head, query, key, *tensors) -> score, where
all but the tensors are scalars. Its text is JSON: the number of arguments, a list of calls ``[operator, args, kwargs]`` in which
``{"node": i}`` is argument or call i, and the number of the result. Calls are of functional operators of aten, and none names a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.operators import schema_of
from fxshard.graph.json_values import NotSerializable, from_json, function_name, operator_of, to_json

DEVICE = ("device", "pin_memory", "layout")
"""Arguments that say where a new tensor is; it is where the arguments of the function are."""
IDENTITY = "[5,[],0]"
"""The text of a score function that returns the score."""
PLACE = 4
"""Number of scalars that say where a score is: batch, head, query, key."""


def function_text(module: fx.GraphModule) -> str:
    """The text of a function whose graph has aten operators only; raises NotSerializable, with the operator, if it has others."""
    numbers: dict[fx.Node, int] = {}
    calls: list[Any] = []
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers |= {node: i for i, node in enumerate(arguments)}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        numbers[node] = len(arguments) + len(calls)
        calls.append(_literal(module, node) if node.op == "get_attr" else _call(node, numbers))
    result = module.graph.output_node().args[0]
    if isinstance(result, (tuple, list)):
        (result,) = result
    if not isinstance(result, fx.Node):
        raise NotSerializable(f"a function of constant result {result}")
    return json.dumps([len(arguments), calls, numbers[result]], separators=(",", ":"))


def _call(node: fx.Node, numbers: dict[fx.Node, int]) -> list[Any]:
    _check(node.target)
    kwargs = {name: value for name, value in node.kwargs.items() if name not in DEVICE}
    return [function_name(node.target), *(to_json(value, numbers.__getitem__) for value in (list(node.args), kwargs))]


def _literal(module: fx.GraphModule, node: fx.Node) -> list[Any]:
    """A tensor that the function itself makes of a Python number."""
    value = getattr(module, str(node.target), None)
    if not isinstance(value, torch.Tensor) or value.ndim:
        raise NotSerializable(f"{node.target}, a constant that is not a number")
    return [function_name(torch.ops.aten.scalar_tensor.default), [value.item()], {"dict": {"dtype": to_json(value.dtype, _no_node)}}]


def _no_node(node: fx.Node) -> Any:
    raise NotSerializable(str(node))


def _check(target: Any) -> None:
    schema = schema_of(target)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or schema is None or schema.is_mutable:
        raise NotSerializable(str(target))
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise NotSerializable(f"{target}, which draws random numbers")


def _makes_tensors(target: Any) -> bool:
    """Whether an operator may be told a device."""
    schema = schema_of(target)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


@lru_cache(maxsize=256)
def function_of(text: str, index: Callable[..., torch.Tensor] | None = None) -> Callable[..., torch.Tensor]:
    """The function of a text, of scalars and the tensors that it reads. ``index``: what to call for ``aten.index``."""
    count, calls, result = json.loads(text)
    steps = [(known(name), args, kwargs) for name, args, kwargs in calls]
    if index is not None:
        steps = [(index if target is torch.ops.aten.index.Tensor else target, args, kwargs) for target, args, kwargs in steps]
    placed = {target for target, _, _ in steps if target is not index and _makes_tensors(target)}

    def function(*args: Any) -> torch.Tensor:
        values = list(args[:count])
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        for target, given, named in steps:
            kwargs = from_json(named, values)
            if target in placed:
                kwargs["device"] = device
            values.append(target(*from_json(given, values), **kwargs))
        found: torch.Tensor = values[result]
        return found

    return function


def known(name: str) -> Any:
    """The operator of a name in a text; raises NotSerializable if a function may not call it, or if there is none."""
    try:
        found = operator_of(name)
    except (AttributeError, ValueError) as error:
        raise NotSerializable(name) from error
    _check(found)
    return found


def is_identity(text: str) -> bool:
    """Whether a function of a score returns the score."""
    return bool(json.loads(text)[2] == 0)


def everywhere(function: Callable[..., torch.Tensor], scores: int, tensors: int) -> Callable[..., torch.Tensor]:
    """``function`` for all places at once: of ``scores`` (0 or 1) tensors [b, h, s, t], of vectors of batches, heads, queries and keys, and
    of ``tensors`` tensors, with a result [b, h, s, t]."""
    for dim in reversed(range(PLACE)):
        mapped = [0 if place == dim else None for place in range(PLACE)]
        function = torch.vmap(function, in_dims=(*[0] * scores, *mapped, *[None] * tensors))
    return function


def place_of(shape: Sequence[int], offsets: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Vectors of the batches, heads, queries and keys of scores of this shape whose first is at ``offsets`` (None for 0)."""
    counts = (torch.arange(size, device=device) for size in shape)
    return tuple(count if offset is None else count + offset for count, offset in zip(counts, offsets, strict=True))


def at_place(function: Callable[..., torch.Tensor], scores: int, given: Sequence[bool]) -> Callable[..., torch.Tensor]:
    """``function`` of ``scores`` (0 or 1) scores, a place in the shard and tensors, the first of which are the places of the shard's first
    batch, head and query that are ``given``."""
    count = sum(given)

    def placed(*args: torch.Tensor) -> torch.Tensor:
        place, rest = args[scores : scores + PLACE], args[scores + PLACE :]
        offsets = iter(rest[:count])
        moved = [one + next(offsets) if known else one for one, known in zip(place, (*given, False), strict=True)]
        return function(*args[:scores], *moved, *rest[count:])

    return placed
