"""Turns constant tensors of a model (``torch.tensor([...])`` in the forward, attributes that are not buffers) into calls in the graph.

A planning graph contains no tensors, so that it can be stored, hashed, and run on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensor, changes_of
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line
from fxshard.graph.side_effects import Attribute
from fxshard.ops.creation import MAX_CONSTANT_ELEMENTS
from fxshard.passes.trace.rewrites.probe import probe

BUFFER = "register it as a buffer (register_buffer(name, value, persistent=False) keeps it out of the state_dict)"
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensor attributes of ``module`` itself, also inside containers, that are neither parameters nor buffers, by path."""
    own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
    found = {}
    for name, value in own.items():
        leaves = [((), value)] if isinstance(value, torch.Tensor) else pytree.tree_flatten_with_path(value)[0]
        found.update({name + pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)})
    return found


def replace_tensor_attributes(
    captured: fx.GraphModule, model: nn.Module, fake_model: nn.Module, names: Mapping[str, str], flat_args: Sequence[Any]
) -> frozenset[Attribute]:
    """Replaces tensors in ``captured`` that are not parameters or buffers by calls that create them; returns the attributes replaced.

    ``names``: from ``parameter_names``. Raises TraceError for a tensor that is too large, requires a gradient, or is changed.
    """
    registered = {id(t) for t in (*fake_model.parameters(), *fake_model.buffers())}
    held = dict(captured.named_buffers(remove_duplicate=False))
    plain = {name: value for name, value in held.items() if id(value) not in registered}
    if not plain:
        return frozenset()
    origin = _origins(model, fake_model)
    _refuse_changed(captured, plain, origin, flat_args)
    for node in list(captured.graph.nodes):
        if node.op == "get_attr" and node.target in plain:
            path, value, _ = origin.get(id(plain[node.target]), (names.get(node.target, node.target), plain[node.target], None))
            _replace(captured, node, *creation(value, f"the attribute {path}", None))
    for name in plain:
        delattr(captured, name)
    captured.recompile()
    return frozenset(origin[id(value)][2] for value in plain.values() if id(value) in origin)


def _origins(model: nn.Module, fake_model: nn.Module) -> dict[int, tuple[str, torch.Tensor, Attribute]]:
    """Id of a fake attribute -> (its path in the model, the model's own tensor, the attribute)."""
    found = {}
    for place, ((prefix, module), fake) in enumerate(zip(model.named_modules(), fake_model.modules(), strict=True)):
        fakes = plain_tensors(fake)
        for path, value in plain_tensors(module).items():
            if path in fakes:
                found[id(fakes[path])] = (f"{prefix}.{path}" if prefix else path, value, (place, path))
    return found


def _refuse_changed(
    captured: fx.GraphModule, plain: Mapping[str, torch.Tensor], origin: Mapping[int, Any], flat_args: Sequence[Any]
) -> None:
    before = {name: changes_of(value) for name, value in plain.items()}
    probes = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in flat_args]
    probe(captured, probes)
    for name, value in plain.items():
        if changes_of(value) != before[name]:
            path = origin[id(value)][0] if id(value) in origin else name
            raise TraceError(f"the attribute {path} is changed in the forward but is not a buffer", remedy=BUFFER)


def replace_constants(joint: fx.GraphModule) -> None:
    """Replaces the tensor attributes of the joint graph by calls that create them."""
    for node in list(joint.graph.nodes):
        if node.op == "get_attr" and node.users:
            value = getattr(joint, node.target, None)
            if not isinstance(value, torch.Tensor):
                user = next(iter(node.users))
                raise TraceError(
                    f"{user.target} holds a graph of its own, which cannot be sharded",
                    where=source_line(user) or user.name,
                    remedy="compute both branches and choose with torch.where, or unroll the loop",
                )
            _replace(joint, node, *creation(value, "a constant tensor", source_line(node)))


def _replace(module: fx.GraphModule, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with module.graph.inserting_before(node):
        call = module.graph.call_function(target, args, kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)


def creation(value: torch.Tensor, what: str, where: str | None) -> Call:
    """The call that creates ``value``: ``aten.full`` if all elements are equal, else ``fxshard.constant``.

    Raises TraceError, with ``what`` and ``where``, for a tensor that a graph cannot contain.
    """
    if value.requires_grad:
        raise TraceError(f"{what} requires a gradient but is not a parameter", where=where, remedy="make it an nn.Parameter, or detach it")
    if isinstance(value, FakeTensor) or value.is_meta:
        raise TraceError(
            f"{what} has no values: it is a {'fake' if isinstance(value, FakeTensor) else 'meta'} tensor", where=where, remedy=BUFFER
        )
    if value.layout != torch.strided or value.is_complex() or value.is_quantized:
        raise TraceError(f"{what} is of a kind that a graph cannot spell out ({value.layout}, {value.dtype})", where=where, remedy=BUFFER)
    flat = value.detach().cpu().flatten()
    exact = flat.to(torch.float64) if flat.dtype.is_floating_point else flat
    if not len(exact) or bool((exact == exact[0]).all()):
        filling = exact[0].item() if len(exact) else 0
        return torch.ops.aten.full.default, (list(value.shape), filling), {"dtype": value.dtype}
    if value.numel() > MAX_CONSTANT_ELEMENTS:
        raise TraceError(
            f"{what} has {value.numel()} elements, a graph spells out at most {MAX_CONSTANT_ELEMENTS}", where=where, remedy=BUFFER
        )
    return torch.ops.fxshard.constant.default, (exact.tolist(), list(value.shape), value.dtype), {}
