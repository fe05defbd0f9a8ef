"""Call: one call of a parallelized module, for which a program is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxshard._torch_compat import pytree
from fxshard.graph.objects import Counted, open_call
from fxshard.runtime.calls.attributes import Attributes
from fxshard.runtime.calls.inputs import flatten_call, leaf_names
from fxshard.runtime.module.module_state import Hooks


@dataclass(frozen=True)
class Call:
    """The arguments, with objects opened (see ``fxshard.graph.objects``), their leaves by name and their structure; whether the call is for
    training; the modules' attributes and hooks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: Mapping[str, Any]
    spec: pytree.TreeSpec
    train: bool
    attributes: Attributes
    hooks: Hooks

    @property
    def leaves(self) -> list[Any]:
        return list(self.named.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.named.items() if isinstance(leaf, torch.Tensor)}


def opened(args: tuple[Any, ...], kwargs: dict[str, Any], counted: Counted, train: bool, attributes: Attributes, hooks: Hooks) -> Call:
    """The call of these arguments; ``counted`` as in ``open_call``."""
    args, kwargs, _ = open_call(args, kwargs, counted)
    leaves, spec = flatten_call(args, kwargs)
    return Call(args, kwargs, dict(zip(leaf_names(args, kwargs), leaves, strict=True)), spec, train, attributes, hooks)
