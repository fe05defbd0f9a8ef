"""Private names of torch (2.13): whether a transform of ``torch.func`` is running.

What would replace it: a public question for the active transforms, and transforms that end when an error passes through a traced graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C import _functorch


def in_transform() -> bool:
    """Whether ``vmap``, ``grad``, ``jvp`` or another transform runs at present."""
    return bool(_functorch.get_dynamic_layer_stack_depth())


@contextlib.contextmanager
def transforms_ended() -> Iterator[None]:
    """Ends the transforms that were begun within it: a captured graph begins and ends them by calls, and an error leaves them active."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
