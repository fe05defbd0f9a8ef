"""Attention under a mask that is causal, or hides nothing, says so instead of reading the mask.

Models of transformers make their causal mask as a tensor whenever they are traced. Without the tensor, attention runs the flash kernel,
computes half of the scores, and a sequence can be sharded by a ring.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.passes.trace.rewrites.index_values import Known, Where, opposite
from fxshard.passes.trace.rewrites.known_values import known_values

ATTENTION = {torch.ops.fxshard.sdpa.default: (0, 3), torch.ops.fxshard.sdpa_backward.default: (1, 6)}
"""Where the queries and the mask are among the arguments; ``is_causal`` follows the mask."""


def use_known_masks(joint: fx.GraphModule) -> None:
    """Replaces such masks [.., queries, keys] by None and ``is_causal``, and removes what nobody reads then."""
    masked = [n for n in joint.graph.nodes if n.target in ATTENTION and isinstance(_mask_of(n), fx.Node) and _broadcasts(n)]
    known = known_values(map(_mask_of, masked))
    for node in masked:
        at = ATTENTION[node.target][1]
        value, is_causal = known.get(node.args[at]), node.args[at + 1]
        if value is None or is_causal:
            continue
        causal = is_causal_mask(value)
        if causal or hides_nothing(value):
            node.args = (*node.args[:at], None, causal, *node.args[at + 2 :])
    if known:
        joint.graph.eliminate_dead_code()


def _mask_of(node: fx.Node) -> fx.Node:
    return node.args[ATTENTION[node.target][1]]


def _broadcasts(node: fx.Node) -> bool:
    """Whether the mask has the batch and the heads of the queries, or one: the kernel says so of a mask that has others."""
    query, mask = node.args[ATTENTION[node.target][0]].meta["val"], _mask_of(node).meta["val"]
    return mask.dim() == 4 and all(surely(mask.shape[d] == 1) or surely(mask.shape[d] == query.shape[d]) for d in (0, 1))


def hides_nothing(value: Known) -> bool:
    """Whether a mask is True everywhere, or adds 0."""
    return isinstance(value, Where) and not value.reached and (value.yes if isinstance(value.yes, bool) else value.yes == 0)


def is_causal_mask(value: Known) -> bool:
    """Whether query i sees the keys 0 to i: the mask is True there and False elsewhere, or adds 0 there and -inf elsewhere."""
    if not isinstance(value, Where):
        return False
    seen, hidden = (True, False) if isinstance(value.yes, bool) else (0, -math.inf)
    turned = value if value.yes == seen else opposite(value)
    if turned is None or (turned.yes, turned.no) != (seen, hidden) or len(turned.reached) != 1:
        return False
    diagonal = turned.reached[0]  # query - key >= 0
    return surely(diagonal.start == 0) and diagonal.steps == (*(0,) * (len(diagonal.steps) - 2), 1, -1)
