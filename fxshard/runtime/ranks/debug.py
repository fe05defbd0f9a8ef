"""Debug mode: before each collective is issued, all ranks of the mesh compare which one it is, through the store.

It watches torch's dispatcher, so that it sees what runs, compiled or not. A collective then costs some round trips to the
store (see docs/faults.md), and the ranks go in step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode, named_arguments
from fxshard.errors import RunError
from fxshard.runtime.rank_graph.bind import axis_of_group
from fxshard.runtime.ranks.agreement import Meeting, default_group, name_ranks
from fxshard.runtime.ranks.heartbeat import Doing
from fxshard.runtime.ranks.record import kind_of

REMEDY = "build the same program on all ranks (versions, options, files); what a rank compiles is in dump="


def debugging(chosen: bool = False) -> bool:
    """Whether to check collectives: where it was ``chosen``, and everywhere with FXSHARD_DEBUG=1."""
    return chosen or os.environ.get("FXSHARD_DEBUG", "0") not in ("", "0")


class Checks(TorchDispatchMode):
    """While it is entered, collectives are compared among ``ranks`` before they are issued, and at the end that none is left out.

    Raises RunError, on all ranks, naming who issues what, and for which node; or naming the ranks that did not come within ``timeout``.
    """

    def __init__(self, doing: Doing, ranks: Sequence[int], timeout: float) -> None:
        super().__init__()
        self.doing, self.ranks, self.timeout, self.count = doing, ranks, timeout, 0

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._check("no further collective")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is not None:
            self._check(signature(kind, func, args))
        return func(*args, **(kwargs or {}))

    def _check(self, said: str) -> None:
        group = default_group(self.ranks)
        if group is None:
            return
        self.count += 1
        with Meeting(group, "check a collective", said, self.timeout) as meeting:
            if not meeting.leads:
                meeting.outcome()
                return
            notes = meeting.everyone()
            if len(set(notes.values())) > 1:
                meeting.refuse(self._difference(notes))
            meeting.decide()

    def _difference(self, notes: dict[int, str]) -> RunError:
        held = {said: name_ranks(r for r in notes if notes[r] == said) for said in notes.values()}
        what = "the ranks are about to issue different collectives: " + "; ".join(f"{ranks}: {said}" for said, ranks in held.items())
        names = self.doing.names()
        node = names[self.count - 1] if self.count <= len(names) else "its end"
        return RunError(what, where=f"{node} (collective {self.count} of {len(names)} of {self.doing.what}), as planned", remedy=REMEDY)


def signature(kind: str, func: Any, args: Sequence[Any]) -> str:
    """``all_reduce of (4, 8) float32, sum, over tp``: everything that ranks must have in common."""
    given = named_arguments(func, args)
    tensor: torch.Tensor = given.get("input", args[0])
    others = [str(x) for x in args if not isinstance(x, torch.Tensor) and x != given["group_name"]]
    shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{kind} of {', '.join([shape, *others])}, over {axis_of_group(given['group_name'])}"
