"""A memory profile as text: the peak and its kinds, the largest tensors, and the bytes over time."""

from __future__ import annotations

import itertools

from fxshard.byte_sizes import exact_size, size_text
from fxshard.memory_profile import HeldTensor, MemoryProfile
from fxshard.text_table import fitted, labelled

SHOWN, ROWS, WIDTH = 5, 12, 32


def memory_table(profile: MemoryProfile, shown: int = SHOWN) -> str:
    """``shown``: number of tensors to list among those alive at the peak, the largest first."""
    step = profile.steps[profile.peak_step]
    head = [("peak per device", exact_size(profile.peak)), ("at", f"{step.name} ({step.op})" if step.op else step.name)]
    head += [("source", step.source)] if step.source else []
    head += [("not counted", f"{', '.join(profile.unknown)}: only running tells their size")] if profile.unknown else []
    kinds = [(kind, size_text(size), f"{size / max(profile.peak, 1):.1%}") for kind, size in profile.by_kind().items()]
    parts = [
        labelled(head),
        fitted(kinds, ("at the peak", "bytes", "share"), same=False),
        fitted([_row(t) for t in profile.alive()[:shown]], ("tensor", "kind", "bytes", "layout", "shape", "dtype", "source")),
        _over_time(profile),
    ]
    return "\n\n".join(parts)


def _row(t: HeldTensor) -> tuple[str, ...]:
    shape = "x".join(map(str, t.shape)) or "scalar"
    return t.name, t.kind, size_text(t.bytes), t.layout, shape, t.dtype.removeprefix("torch."), t.source


def _over_time(profile: MemoryProfile) -> str:
    """The peak in each of a dozen equal parts of the steps, as bars, with the user's source line."""
    count = len(profile.steps)
    edges = [count * i // min(ROWS, count) for i in range(min(ROWS, count) + 1)]
    rows = []
    for a, b in itertools.pairwise(edges):
        most = max(range(a, b), key=profile.over_time.__getitem__)
        size = profile.over_time[most]
        rows.append((f"{a}-{b - 1}", size_text(size), "#" * round(WIDTH * size / max(profile.peak, 1)), profile.steps[most].source))
    return fitted(rows, ("steps", "bytes", "over time", "source"), same=False)
