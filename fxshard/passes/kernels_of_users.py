"""User kernels in a traced graph: a Triton kernel says nothing about what it reads and writes, so it is refused by name."""

from __future__ import annotations

from torch import fx

from fxshard.errors import TraceError
from fxshard.planning_graph import source_line

TRITON = "triton_kernel_wrapper"


def refuse_kernels(graph: fx.Graph) -> None:
    """Raises TraceError for a Triton kernel, called as it is or from inside a ``triton_op``, which torch expands while it traces."""
    for node in graph.nodes:
        if node.op == "call_function" and TRITON in str(node.target):
            raise TraceError(
                f"{node.name} calls a Triton kernel, whose shapes and sharding nobody can tell",
                where=source_line(node) or node.name,
                remedy="put the call into an operator that stays whole: @torch.library.custom_op with register_fake and register_autograd; "
                "it then runs replicated, or as fxshard.register_rule says (triton_op does not do: torch opens it up)",
            )
