"""Private names of torch (2.13): its logs, which TORCH_LOGS switches on, and its structured trace, which TORCH_TRACE writes for tlparse.

``TORCH_LOGS="+fxshard"`` needs nothing private: torch takes the name of any module, and gives that module's logger a level and a handler.
What would replace the rest: a public ``torch._logging.trace_structured``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch._logging import _internal, trace_structured

PACKAGE = "fxshard"


def one_handler() -> None:
    """Keeps what torch's handler prints from the handlers of parent loggers, which would print it again. torch does so for its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == PACKAGE:
            log = logging.getLogger(name)
            log.propagate = log.propagate and not any(_internal._is_torch_handler(one) for one in log.handlers)


def traces() -> bool:
    """Whether somebody keeps the structured trace: TORCH_TRACE names a folder."""
    handler = _internal.LOG_TRACE_HANDLER
    return handler is not None and handler.root_dir is not None and handler in _internal.trace_log.handlers


def trace_artifact(name: str, content: Callable[[], Any], encoding: str = "string") -> None:
    """Adds an artifact to the structured trace; ``content`` is called only if the trace is kept.

    ``encoding``: ``"string"``, or ``"json"`` for a text in JSON or an object that becomes one.
    """
    if traces():
        said = {"name": name, "encoding": encoding}
        trace_structured("artifact", metadata_fn=lambda: said, payload_fn=content, expect_trace_id=False)
