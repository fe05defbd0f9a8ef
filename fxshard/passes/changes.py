"""Attributes, lists and globals that a forward changes: a graph computes tensors only, so that it is said which are left as they are."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

log = logging.getLogger("fxshard")
REMEDY = ", and computes with what they were when it was traced: keep what a forward counts or remembers in a buffer"


def say_changes(model: str, sources: Sequence[str]) -> None:
    """Logs what the forward of ``model`` changes, ``sources`` as Dynamo names them: a warning where it is of the model itself."""
    names = [re.sub(r".*_modules\['_export_root'\]", "self", s).replace(".__dict__", "") for s in sources if not s.endswith("['_buffers']")]
    own = any(name.startswith("self") for name in names)
    text = f"the forward of %s changes Python objects (%s); what is sharded leaves them as they are{REMEDY if own else ''}"
    if names:
        log.log(logging.WARNING if own else logging.INFO, text, model, ", ".join(names))
