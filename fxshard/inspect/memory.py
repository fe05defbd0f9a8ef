"""A memory profile as text: the peak, what it is made of, the tensors that weigh most, and the bytes over time."""

from __future__ import annotations

import itertools

from tabulate import tabulate

from fxshard.inspect.tables import size_text
from fxshard.memory_profile import HeldTensor, MemoryProfile

SHOWN, ROWS, WIDTH = 5, 12, 40


def memory_table(profile: MemoryProfile, shown: int = SHOWN) -> str:
    """``shown``: how many of the tensors alive at the peak are listed, the largest first."""
    step = profile.steps[profile.peak_step]
    head = [("peak per device", size_text(profile.peak)), ("at", f"{step.name} ({step.op})" if step.op else step.name)]
    head += [("source", step.source)] if step.source else []
    head += [("not counted", f"{', '.join(profile.unknown)}: only running tells their size")] if profile.unknown else []
    kinds = [(kind, size, f"{size / max(profile.peak, 1):.1%}") for kind, size in profile.by_kind().items()]
    parts = [
        tabulate(head, tablefmt="plain", disable_numparse=True),
        tabulate(kinds, headers=("at the peak", "bytes", "share"), disable_numparse=[0, 2]),
        tabulate(
            [_row(t) for t in profile.alive()[:shown]],
            headers=("tensor", "kind", "bytes", "layout", "shape", "dtype", "source"),
            disable_numparse=[0, 1, 3, 4, 5, 6],
        ),
        _over_time(profile),
    ]
    return "\n\n".join(parts)


def _row(t: HeldTensor) -> tuple[str, str, int, str, str, str, str]:
    return t.name, t.kind, t.bytes, t.layout, "x".join(map(str, t.shape)) or "scalar", t.dtype.removeprefix("torch."), t.source


def _over_time(profile: MemoryProfile) -> str:
    """The most bytes in each of a dozen equal parts of the steps, as bars."""
    count = len(profile.steps)
    edges = [count * i // min(ROWS, count) for i in range(min(ROWS, count) + 1)]
    parts = [(f"{a}-{b - 1}", max(profile.over_time[a:b])) for a, b in itertools.pairwise(edges)]
    rows = [(steps, size, "#" * round(WIDTH * size / max(profile.peak, 1))) for steps, size in parts]
    return tabulate(rows, headers=("steps", "bytes", "over time"), disable_numparse=[0, 2])
