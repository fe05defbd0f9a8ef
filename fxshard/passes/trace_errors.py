"""Whatever tracing raises, as a TraceError that names the user's line and what stood in the way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from fxshard.errors import FxshardError, TraceError
from fxshard.planning_graph import of_user, source_line

GRAPH_BREAKS = "remove graph breaks (data-dependent branches, .item(), printing) there, or shard a submodule that traces"
DATA_DEPENDENT = {
    "DynamicOutputShapeException": "gives a result whose size depends on the data",
    "DataDependentOutputException": "turns data into a Python number",
}
"""torch's exceptions that say no more than an operator's name."""


@contextlib.contextmanager
def readable_errors(what: str, remedy: str = GRAPH_BREAKS) -> Iterator[None]:
    """Whatever tracing ``what`` raises becomes a TraceError that keeps the user's line."""
    try:
        yield
    except FxshardError:
        raise
    except Exception as error:
        raise TraceError(
            f"the model does not trace to one graph: {_reason(error)}", where=_user_line(error) or what, remedy=remedy
        ) from error


def _reason(error: Exception) -> str:
    """The first line, and what Dynamo has to explain."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    known = DATA_DEPENDENT.get(type(error).__name__)
    if known is not None:
        return f"{first} {known}"
    explanation = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{first}: {explanation}" if explanation else first


def _user_line(error: Exception) -> str | None:
    """From the stack that Dynamo kept, from the error's text, or from the node that was running."""
    stack = [(f.filename, f.lineno, f.line) for f in getattr(error, "real_stack", None) or ()]
    text = re.findall(r'File "([^"]+)", line (\d+)(?:, in \S+)?\n\s*(.*)', str(error))
    for frames in (stack, text):
        mine = [frame for frame in frames if of_user(frame[0])]
        if mine:
            return "{}:{}: {}".format(*mine[-1])
    node = _running_node(error)
    return None if node is None else source_line(node)


def _running_node(error: Exception) -> fx.Node | None:
    """The node that an interpreter was at when ``error`` was raised."""
    found, step = None, error.__traceback__
    while step is not None:
        node: Any = step.tb_frame.f_locals.get("n") if step.tb_frame.f_code.co_name == "run_node" else None
        found = node if isinstance(node, fx.Node) else found
        step = step.tb_next
    return found
