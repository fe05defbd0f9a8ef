"""What the optimiser's step copies to the device at once, as the states of one variable.

Parameters step one after another, so the largest counts. A maximum is not a sum over variables; a variable for it makes it one: its states
are the sizes that occur, and no parameter on the host may need more than the one chosen.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from fxshard.passes.memory.memory_use import MemoryUse
from fxshard.passes.memory.offload import DEVICE, staged_bytes


class Staging:
    """``sizes``: bytes by state of the variable, ascending."""

    def __init__(self, usage: MemoryUse) -> None:
        nodes = {var: node for node, (var, _) in usage.node_vars.items() if var in usage.places}
        self._needed = {}
        for var, node in nodes.items():
            specs, value = usage.node_vars[node][1], usage.modes.times.graph.by_name[node]
            placed = zip(specs, usage.places[var], strict=True)
            of = (0 if at == DEVICE else staged_bytes(value, spec.outputs[0], at, usage.mesh, usage.optimizer) for spec, at in placed)
            self._needed[var] = np.array(list(of), dtype=np.float64) * (node in usage.modes.times.trained)
        self.sizes = np.unique(np.concatenate([np.zeros(1), *self._needed.values()]))

    @cached_property
    def costs(self) -> dict[int, np.ndarray]:
        """Variable of a parameter -> costs with the variable's states: inf where it needs more."""
        return {var: np.where(needed[:, None] > self.sizes[None, :], np.inf, 0.0) for var, needed in self._needed.items()}
