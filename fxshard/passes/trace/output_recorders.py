"""Hooks by which models of transformers record hidden states, attentions and the logits of routers.

transformers installs them in the first call that asks for such outputs, under a lock, which Dynamo cannot enter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

RECORDING = "transformers.utils.output_capturing"


def install_output_recorders(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Installs the hooks now, on each part of ``model`` that records, if a call with ``kwargs`` asks for it, or a config does."""
    if RECORDING in sys.modules:
        for part in model.modules():
            if _records(part) and (_asks(kwargs) or _asks(_settings(part))):
                sys.modules[RECORDING].maybe_install_capturing_hooks(part)


def _records(part: nn.Module) -> bool:
    """Whether the forward of a module's class is one that transformers wraps to record outputs."""
    forward: Any = type(part).forward
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == RECORDING:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _asks(settings: Mapping[str, Any]) -> bool:
    """Whether one of ``output_hidden_states``, ``output_attentions``, ``output_router_logits``, ... is on."""
    return any(name.startswith("output_") and value not in (None, False) for name, value in settings.items())


def _settings(part: nn.Module) -> dict[str, Any]:
    config = getattr(part, "config", None)
    return {name: getattr(config, name, None) for name in dir(config) if name.startswith("output_")}
