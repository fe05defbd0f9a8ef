"""Debug mode: before each collective, all ranks of the mesh check through the store that they issue the same one.

It hooks torch's dispatcher, so it sees what runs, compiled or not. Each collective then costs some round trips to the store (see
docs/faults.md), and the ranks run in lockstep.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from fxshard._torch_compat import TorchDispatchMode
from fxshard._torch_compat.operators import named_arguments
from fxshard.errors import RunError
from fxshard.runtime.rank_graph.bind import axis_of_group
from fxshard.runtime.ranks.agreement import agree, default_group, name_ranks
from fxshard.runtime.ranks.heartbeat import Activity
from fxshard.runtime.ranks.record import kind_of

REMEDY = "build the same program on all ranks (versions, options, files); what a rank compiles is in dump="


def debugging(chosen: bool = False) -> bool:
    """Whether to check collectives: if ``chosen``, or if FXSHARD_DEBUG=1."""
    return chosen or os.environ.get("FXSHARD_DEBUG", "0") not in ("", "0")


class CollectiveChecks(TorchDispatchMode):
    """While active, ``ranks`` compare each collective before issuing it, and at the end check that none is missing.

    Raises RunError on all ranks, which names the differing collectives and their node, or the ranks that did not come within ``timeout``.
    """

    def __init__(self, activity: Activity, ranks: Sequence[int], timeout: float) -> None:
        super().__init__()
        self.activity, self.ranks, self.timeout, self.count = activity, ranks, timeout, 0

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._check("no further collective")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is not None:
            self._check(signature(kind, func, args))
        return func(*args, **(kwargs or {}))

    def _check(self, text: str) -> None:
        group = default_group(self.ranks)
        if group is None:
            return
        self.count += 1
        agree(group, "check a collective", text, self._difference, self.timeout)

    def _difference(self, notes: dict[int, str]) -> RunError | Literal[""]:
        if len(set(notes.values())) == 1:
            return ""
        held = {text: name_ranks(r for r in notes if notes[r] == text) for text in notes.values()}
        what = "the ranks are about to issue different collectives: " + "; ".join(f"{ranks}: {text}" for text, ranks in held.items())
        names = self.activity.names()
        node = names[self.count - 1] if self.count <= len(names) else "its end"
        return RunError(what, where=f"{node} (collective {self.count} of {len(names)} of {self.activity.what}), as planned", remedy=REMEDY)


def signature(kind: str, func: Any, args: Sequence[Any]) -> str:
    """``all_reduce of (4, 8) float32, sum, over tp``: everything that must be equal on all ranks."""
    given = named_arguments(func, args)
    tensor: torch.Tensor = given.get("input", args[0])
    others = [str(x) for x in args if not isinstance(x, torch.Tensor) and x != given["group_name"]]
    shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{kind} of {', '.join([shape, *others])}, over {axis_of_group(given['group_name'])}"
