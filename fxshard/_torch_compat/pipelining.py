"""Private names of torch (2.13): the marker at which ``torch.distributed.pipelining`` splits a graph.

What would replace them: a public name for the operator that ``pipe_split`` calls.
"""

from __future__ import annotations

import torch
import torch.distributed.pipelining

PIPE_SPLIT = torch.ops.pippy._pipe_split.default
