"""Private names of torch (2.13): compiled autograd, by which Dynamo captures what ``backward`` runs between programs.

What would replace it: a public function that says whether a backend is given such a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def in_compiled_autograd() -> bool:
    """Whether the graph that Dynamo captures is a part of the backward of compiled autograd."""
    from torch._dynamo import compiled_autograd

    return bool(compiled_autograd.in_compiled_autograd_region)


def compile_by_torch(backend: str, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph that Dynamo captured, compiled by the backend of torch with this name."""
    from torch._dynamo import lookup_backend

    compiled: Callable[..., Any] = lookup_backend(backend)(module, example_inputs)
    return compiled
