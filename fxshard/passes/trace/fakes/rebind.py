"""Makes functions that a copied model holds (an instance's ``forward``, its hooks) refer to the copy.

``copy.deepcopy`` copies bound methods and partials but not functions: a closure or a default argument still refers to the modules,
parameters and lists of the original model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fxshard._torch_compat.dynamo.hooks import TABLES
from fxshard.errors import TraceError


def rebind(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Rebinds all functions that the modules of ``copied`` hold. ``memo``: id of an original -> its copy, filled by ``copy.deepcopy``."""
    done: dict[int, Any] = {}
    for module in copied.modules():
        state = vars(module)
        for table in (state, *(state[name] for name in TABLES)):
            for name, value in list(table.items()):
                if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    table[name] = rebound(value, memo, done)


def rebound(value: Any, memo: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """``value`` with references to originals replaced by their copies; ``value`` itself if it has none."""
    if id(value) in memo:
        value = memo[id(value)]
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, types.FunctionType):
        return _function(value, memo, done)
    if isinstance(value, types.MethodType):
        function, owner = rebound(value.__func__, memo, done), rebound(value.__self__, memo, done)
        return value if function is value.__func__ and owner is value.__self__ else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        args = [rebound(a, memo, done) for a in value.args]
        return functools.partial(rebound(value.func, memo, done), *args, **{k: rebound(v, memo, done) for k, v in value.keywords.items()})
    if type(value) in (list, tuple):
        items = [rebound(item, memo, done) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _function(function: types.FunctionType, memo: Mapping[int, Any], done: dict[int, Any]) -> types.FunctionType:
    cells = [types.CellType() for _ in function.__closure__ or ()]
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells) or None)
    done[id(function)] = new  # a function may close over itself
    changed = False
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        try:
            value = old.cell_contents
        except ValueError:  # an empty cell
            continue
        cell.cell_contents = rebound(value, memo, done)
        changed |= cell.cell_contents is not value
    new.__defaults__ = None if function.__defaults__ is None else tuple(rebound(v, memo, done) for v in function.__defaults__)
    new.__kwdefaults__ = {k: rebound(v, memo, done) for k, v in (function.__kwdefaults__ or {}).items()} or None
    changed |= any(a is not b for a, b in zip(new.__defaults__ or (), function.__defaults__ or (), strict=True))
    changed |= any(a is not b for a, b in zip((new.__kwdefaults__ or {}).values(), (function.__kwdefaults__ or {}).values(), strict=True))
    new.__dict__.update(function.__dict__)
    if not changed:
        done[id(function)] = function
    return done[id(function)]


def parameter_names(fake_model: nn.Module, captured: fx.GraphModule) -> dict[str, str]:
    """Dynamo's mangled names -> the model's FQNs, matched by identity; raises TraceError for a parameter that is not the model's."""
    fqn = {}
    for items in (fake_model.named_parameters(), fake_model.named_buffers()):
        fqn.update({id(value): name for name, value in items})
    names = {}
    for items in (captured.named_parameters(remove_duplicate=False), captured.named_buffers(remove_duplicate=False)):
        names.update({name: fqn.get(id(value), name) for name, value in items})
    others = [(name, p) for name, p in captured.named_parameters() if id(p) not in fqn]
    if others:
        name, parameter = others[0]
        what = f"the forward reads a parameter that the model does not hold: {_closed_over(fake_model).get(id(parameter), name)}"
        remedy = "register the module that holds it as a submodule (self.other = other), so that it can be sharded, saved and trained"
        raise TraceError(f"{what}, of shape {tuple(parameter.shape)}", where=type(fake_model).__name__, remedy=remedy)
    return names


def _closed_over(model: nn.Module) -> dict[int, str]:
    """By id: names (variable and parameter) of the parameters that functions held by the modules of ``model`` close over."""
    found: dict[int, str] = {}
    for module in model.modules():
        for value in vars(module).values():
            function = getattr(value, "func", getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                held = [(name, _contents(cell)) for name, cell in free]
                held += [(f"argument {i}", a) for i, a in enumerate(getattr(value, "args", ()))]
                for name, other in held:
                    if isinstance(other, nn.Module):
                        found.update({id(p): f"{name}.{key}" for key, p in other.named_parameters()})
                    elif isinstance(other, nn.Parameter):
                        found[id(other)] = name
    return found


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
