"""Attributes, lists and globals that a forward changes, as Dynamo names them, and the log message for changes that are not replayed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

from torch import nn

from fxshard._torch_compat.dynamo.hooks import hooks_of

log = logging.getLogger("fxshard")
REGISTERED = ("_buffers", "_parameters", "_modules")
"""Module tables of registered tensors and submodules; buffers that are assigned are outputs of the program."""
OF_TORCH = "torch.nn.utils."
"""torch's own hooks (weight_norm, spectral_norm, prune) set attributes for the forward to read: the graph contains all their effects."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Tables of hooks, which run after the program and make their changes then."""
REMEDY = ", and computes with the values that they had when it was traced: let the forward keep its counts and state in buffers"


def own_changes(sources: Sequence[str], model: nn.Module) -> list[tuple[str, str]]:
    """(name of the module, attribute) of the changed ``sources`` that belong to ``model``; attribute "" if Dynamo does not name it."""
    names = {name for name, _ in model.named_modules()}
    found = [place for source in sources if (place := _place(source, names)) is not None and not _is_ours(place, model)]
    return [(path, name) for path, name in found if name not in REGISTERED]


def hooked_by_torch(model: nn.Module) -> list[tuple[str, bool]]:
    """(name, whether its class is torch's own, whose forward sets no attributes) of each module with hooks of ``OF_TORCH``."""
    hooked = [(name, m) for name, m in model.named_modules() if any(type(h.call).__module__.startswith(OF_TORCH) for h in hooks_of(m))]
    return [(name, type(module).__module__.startswith("torch.nn.")) for name, module in hooked]


def _is_ours(place: tuple[str, str], model: nn.Module) -> bool:
    """Whether a list or dict belongs to the trace, which attaches it to a module, rather than to the model."""
    path, name = place
    return bool(name) and name not in vars(model.get_submodule(path))


def _is_of_call(source: str, model: nn.Module) -> bool:
    """Whether it is an object among the call's arguments, held by the captured module: its changes are replayed for the caller."""
    found = re.match(r".*\._modules\['_export_root'\](?:\.__dict__)?(?:\.|\[')(bound|objects)\b", source)
    return found is not None and found[1] not in vars(model)


def log_changes(model: nn.Module, sources: Sequence[str], followed: Collection[tuple[str, str]]) -> None:
    """Logs the changes that the forward of ``model`` makes, except those in ``followed``; a warning if the model itself is changed.

    ``followed``: (module, attribute), as from ``own_changes``.
    """
    names = {name for name, _ in model.named_modules()}
    places = [(s, _place(s, names)) for s in sources if not (re.search(r"\b_buffers('\])?$", s) or any(hooks in s for hooks in HOOKS))]
    left = [s for s, place in places if not (place in followed or (place is not None and _is_ours(place, model)) or _is_of_call(s, model))]
    said = [re.sub(r".*_modules\['_export_root'\]", "self", s).replace(".__dict__", "") for s in left]
    own = any(name.startswith("self") for name in said)
    text = f"the forward of %s changes Python objects (%s); the sharded model leaves them unchanged{REMEDY if own else ''}"
    if said:
        log.log(logging.WARNING if own else logging.INFO, text, type(model).__name__, ", ".join(said))


def _place(source: str, names: Collection[str]) -> tuple[str, str] | None:
    """(module, attribute or "") for Dynamo's name of an object; None if it does not belong to one of the modules ``names``."""
    begins, _, rest = source.partition("._modules['_export_root']")
    parts = re.findall(r"\._modules\['(\w+)'\]", rest) if begins else []
    tail = re.sub(r"^(\._modules\['\w+'\])*", "", rest)
    found = re.fullmatch(r"(?:\.__dict__)?(?:\.(\w+)|\['(\w+)'\])|(?:\.__dict__)?()", tail)
    while parts and ".".join(parts) not in names and parts[0] == "model":
        parts = parts[1:]
    path = ".".join(parts)
    return (path, next((g for g in found.groups() if g), "")) if found and "_export_root" in source and path in names else None
