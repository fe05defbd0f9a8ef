"""Attention under a mask that is causal, or hides nothing, says so instead of reading the mask.

Models of transformers make their causal mask as a tensor whenever they are traced. Without the tensor, attention runs the flash kernel,
computes half of the scores, and a sequence can be sharded by a ring.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.passes.trace.rewrites.index_values import Affine, Known, Where, known_values, opposite

MASKS = {torch.ops.fxshard.sdpa.default: 3, torch.ops.fxshard.sdpa_backward.default: 6}
"""Where the mask is among the arguments; ``is_causal`` follows it."""


def use_known_masks(joint: fx.GraphModule) -> None:
    """Replaces such masks [.., queries, keys] by None and ``is_causal``, and removes what nobody reads then."""
    masked = [n for n in joint.graph.nodes if n.target in MASKS and isinstance(n.args[MASKS[n.target]], fx.Node)]
    known = known_values(joint.graph) if masked else {}
    for node in masked:
        at = MASKS[node.target]
        mask, is_causal = node.args[at : at + 2]
        value = known.get(mask)
        if value is not None and not is_causal and (hides_nothing(value) or causal(value)):
            node.args = (*node.args[:at], None, causal(value), *node.args[at + 2 :])
    if known:
        joint.graph.eliminate_dead_code()


def hides_nothing(value: Known) -> bool:
    """Whether a mask is True everywhere, or adds 0."""
    if not isinstance(value, Affine) or not value.is_constant:
        return False
    return value.start if isinstance(value.start, bool) else surely(value.start == 0)


def causal(value: Known) -> bool:
    """Whether query i sees the keys 0 to i: the mask is True there and False elsewhere, or adds 0 there and -inf elsewhere."""
    if not isinstance(value, Where):
        return False
    if (value.yes, value.no) == (-math.inf, 0):
        turned = opposite(value)
        return turned is not None and _on_or_below_diagonal(turned)
    numbers = (True, False) if isinstance(value.yes, bool) else (0, -math.inf)
    return (value.yes, value.no) == numbers and _on_or_below_diagonal(value)


def _on_or_below_diagonal(value: Where) -> bool:
    return all(surely(one.start == 0) and one.steps == (*(0,) * (len(one.steps) - 2), 1, -1) for one in value.reached)
