"""Nodes without a choice of layouts, by cause."""

from __future__ import annotations

from collections.abc import Sequence

NO_RULE = "no rule for"
"""How the reason of a fallback begins if a rule would avoid it."""
WRITTEN_OUT = "written out:"
"""How the reason of a fallback begins if the operator runs as several others."""
Fallbacks = tuple[tuple[str, str], ...]
"""(node, reason) of nodes that are always replicated, or that belong to an operator which runs as several."""


def by_cause(fallbacks: Sequence[tuple[str, str]]) -> dict[str, Fallbacks]:
    """Fallbacks by heading, without empty groups: those that a rule would avoid, others that are replicated, and those written out."""
    lacking = tuple(f for f in fallbacks if f[1].startswith(NO_RULE))
    written = tuple(f for f in fallbacks if f[1].startswith(WRITTEN_OUT))
    others = tuple(f for f in fallbacks if f not in lacking and f not in written)
    kinds = (("replicated for want of a rule", lacking), ("replicated, rule or not", others), ("run as several operators", written))
    return {heading: found for heading, found in kinds if found}
