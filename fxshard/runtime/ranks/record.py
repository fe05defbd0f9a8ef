"""Records the collectives that really run, compiled or not, at torch's dispatcher, to compare them with the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode
from fxshard._torch_compat.operators import named_arguments
from fxshard.passes.after_lowering.forward_backward import forward_collectives
from fxshard.program.sharded_program import COMBINE, DISPATCH, KINDS, SHIFT, ZIGZAG, ProgramCollective, ShardedProgram
from fxshard.runtime.groups.reduce_scatter import as_issued
from fxshard.runtime.rank_graph.bind import axis_of_group
from fxshard.runtime.simulate.simulate import Recorded

NAMES = {operator.overloadpacket.__name__: kind for operator, kind in KINDS.items()}
"""Kind by operator name; Inductor's in-place and out variants append to it."""


@contextmanager
def record_collectives() -> Iterator[list[Recorded]]:
    """Collects this rank's functional collectives in order: ``with record_collectives() as issued: ...``.

    ``axis`` is the mesh axis for groups that a program was bound to, else torch's name of the group.
    """
    issued: list[Recorded] = []
    with _Recorder(issued):
        yield issued


def in_order_of_issue(program: ShardedProgram, backends: Mapping[str, str]) -> tuple[ProgramCollective, ...]:
    """``program.collectives`` as a rank issues them: those of the forward, then those of the backward; ``backends``: by axis."""
    pairs = list(zip([as_issued(backends, c) for c in program.collectives], forward_collectives(program), strict=True))
    return (*(c for c, first in pairs if first), *(c for c, first in pairs if not first))


def kind_of(func: Any) -> str | None:
    """The kind of a collective operator; None for other operators."""
    if func in (SHIFT, ZIGZAG, DISPATCH, COMBINE):
        return KINDS[func]
    if getattr(func, "namespace", None) != "_c10d_functional":
        return None
    return NAMES.get(func.overloadpacket.__name__.removesuffix("_out").removesuffix("_"))


class _Recorder(TorchDispatchMode):
    def __init__(self, issued: list[Recorded]) -> None:
        super().__init__()
        self.issued = issued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is not None:
            self.issued.append(_recorded(kind, func, args))
        return func(*args, **(kwargs or {}))


def _recorded(kind: str, func: Any, args: Any) -> Recorded:
    given = named_arguments(func, args)
    buffer: torch.Tensor = given.get("input", args[0])
    return Recorded(kind, axis_of_group(given["group_name"]), tuple(buffer.shape), str(buffer.dtype), func.overloadpacket.__name__)
