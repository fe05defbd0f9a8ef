"""WaitingForward: the ``forward`` of a module that is parallelized at its first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(eq=False, repr=False)
class WaitingForward:
    """``replaced``: the instance's own ``forward``, if it had one. ``open_parameters``: DTensors whose layouts the first plan decides."""

    module: nn.Module
    replaced: Any
    open_parameters: Sequence[nn.Parameter]

    waits = True

    def __repr__(self) -> str:
        return f"<forward of {type(self.module).__name__}, which is planned at its first call>"

    def remove(self) -> None:
        """Gives the module its own forward back."""
        del self.module.forward
        if self.replaced is not None:
            self.module.forward = self.replaced


def dissolve(model: nn.Module) -> list[nn.Parameter]:
    """Removes the forwards of modules that wait for a first call, since the program of the whole model takes their place; their parameters
    whose layouts are open."""
    waiting = [f for f in (vars(module).get("forward") for module in model.modules()) if isinstance(f, WaitingForward)]
    for forward in waiting:
        forward.remove()
    return [parameter for forward in waiting for parameter in forward.open_parameters]
