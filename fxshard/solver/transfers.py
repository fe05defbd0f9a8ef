"""Values that several nodes read: bringing one into another layout is paid once, however many read it there.

A transfer says which layout each state of the source gives and which one each state of a reader wants. Its cost is

    T(x) = sum over the distinct layouts l that the readers want of prices[h, l],    h what the source gives.

A *split* of the prices over the readers, non-negative with split_1 + split_2 + ... = prices, bounds it from below by
costs of pairs, sum_r split_r[h, l_r] <= T: that is all message passing needs (`links.Splits`). The best split gives the
bound of the linear relaxation with one variable per (h, l), "h is turned into l", no less than any reader's own
marginal of (h, l) - much tighter than what any variable "there is a copy in l" gives, which forgets h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Transfer:
    """One value. have: (k_source,) layout per state; readers: (node, want), want (k_node,) layout per state;
    prices: (given, wanted) cost, >= 0 or `inf`. A reader is not the source; a node may read twice."""

    source: int
    have: IntArray
    readers: tuple[tuple[int, IntArray], ...]
    prices: FloatArray

    def cost(self, choices: Sequence[int] | IntArray) -> float:
        """T(x)."""
        wanted = sorted({int(want[choices[node]]) for node, want in self.readers})
        row = self.prices[self.have[choices[self.source]]]
        return sum(float(row[layout]) for layout in wanted)

    def keep(self, states: Sequence[IntArray | None]) -> Transfer:
        """The same with only some states per node (None keeps all)."""
        own = states[self.source]
        have = self.have if own is None else self.have[own]
        readers = tuple((n, want if (kept := states[n]) is None else want[kept]) for n, want in self.readers)
        return replace(self, have=have, readers=readers)

    def nodes(self) -> list[int]:
        """The source and the readers, each once."""
        return list(dict.fromkeys([self.source, *(node for node, _ in self.readers)]))

    def local(self, node: int, choices: IntArray) -> FloatArray:
        """T for each state of one of its nodes, all others as chosen, (k_node,)."""
        others = {int(want[choices[n]]) for n, want in self.readers if n != node}
        if node == self.source:
            return np.asarray(self.prices[:, sorted(others)].sum(axis=1)[self.have])
        row = self.prices[self.have[choices[self.source]]].copy()
        total = float(row[sorted(others)].sum())
        row[sorted(others)] = 0.0
        wants = [want for n, want in self.readers if n == node]
        cost = np.full(len(wants[0]), total)
        for k, want in enumerate(wants):
            repeated = np.zeros(len(want), dtype=bool)
            for earlier in wants[:k]:
                repeated |= earlier == want
            cost += np.where(repeated, 0.0, row[want])
        return cost

    @property
    def entries(self) -> int:
        """Numbers in its prices, once per reader."""
        return len(self.readers) * self.prices.size
