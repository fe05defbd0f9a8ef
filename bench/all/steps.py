"""Training steps on gloo ranks: fxshard's own choice and the peers' layouts, beside torch's ways (``bench.training``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.all.figures import TIMED, Cell, Figure, interval
from bench.training.__main__ import MODELS, Found, fastest_peer, measured

PART = "steps"
CALIBRATED = "calibrated"
"""In a cell's name, for hardware that `fxshard calibrate` measured; else the name of the preset or file."""
SIZES = ("128/64", "256/128", "512/256")
RANKS, LAYERS, ROUNDS, SECONDS = (2, 4), 2, 15, 20.0
AUTO = "fxshard, its own choice"
OVER = "auto over the fastest peer"
SAME_LAYOUTS = {
    "Megatron's layouts over parallelize_module": (
        "fxshard, Megatron's layouts",
        ("parallelize_module, compiled", "parallelize_module, eager"),
    ),
    "FSDP's layouts over FSDP2": ("fxshard, FSDP's layouts", ("FSDP2, compiled", "FSDP2, compiled whole", "FSDP2, eager")),
    "DDP's layouts over DDP": ("fxshard, DDP's layouts", ("DDP, compiled", "DDP, eager")),
}
"""fxshard with a peer's layouts, and the ways of that peer, the fastest of which counts."""


def cells(hardware: str | None, calibrated: Callable[[int], str], quick: bool = False) -> Iterator[Cell]:
    """A cell for each model, size and number of ranks. ``hardware``: what fxshard plans for; None: what ``calibrated`` measures for a
    number of ranks, when the first cell needs it."""

    def cell(model: str, size: str, ranks: int, given: Mapping[str, object]) -> Cell:
        name = f"{model}, {size}, {ranks} ranks, {hardware or CALIBRATED}"
        return Cell(PART, name, lambda: figures(name, int(size.split("/")[0]), measured(job(model, size, ranks, given))))

    def job(model: str, size: str, ranks: int, given: Mapping[str, object]) -> dict[str, object]:
        return {"model": model, "size": size, "ranks": ranks, "hardware": hardware or calibrated(ranks), "details": False, **given}

    if quick:
        yield cell("llama", "32/16", 2, {"layers": 1, "rounds": 5, "seconds": 1.0, "only": ["DDP, eager", AUTO]})
        return
    for size in SIZES:
        for ranks in RANKS:
            for model in MODELS:
                yield cell(model, size, ranks, {"layers": LAYERS, "rounds": ROUNDS, "seconds": SECONDS, "only": []})


def figures(cell: str, width: int, found: Found) -> Iterator[Figure]:
    """Milliseconds of each way; ratios as medians over the rounds, in each of which all ways had their turn."""
    for name, one in found.items():
        if one["error"]:
            yield Figure(PART, cell, name, None, note=one["error"], required=name == AUTO)
        else:
            yield Figure(PART, cell, name, *interval(one["ms"]))
    peer = fastest_peer(found)
    if peer and found[AUTO]["ms"]:
        yield _ratio(cell, OVER, found, AUTO, peer, 0.95 if width >= 256 else 1.02)
    for name, (mine, ways) in SAME_LAYOUTS.items():
        ran = [way for way in ways if way in found and found[way]["ms"]]
        if ran and mine in found and found[mine]["ms"]:
            yield _ratio(cell, name, found, mine, min(ran, key=lambda way: statistics.median(found[way]["ms"])))
    if found[AUTO]["ms"]:
        predicted = [found[AUTO]["predicted"] / ms for ms in found[AUTO]["ms"]]
        yield Figure(PART, cell, "predicted over measured", *interval(predicted))


def _ratio(cell: str, name: str, found: Found, mine: str, other: str, goal: float | None = None) -> Figure:
    ratios = [a / b for a, b in zip(found[mine]["ms"], found[other]["ms"], strict=True)]
    return Figure(PART, cell, name, *interval(ratios), goal=goal, noise=TIMED, note=other)


def rows(kept: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """The table's rows: a cell, its ratios with their intervals, the fastest peer, and the load."""
    by_cell: dict[str, dict[str, Figure]] = {}
    for one in kept:
        by_cell.setdefault(one.cell, {})[one.name] = one
    for cell, found in by_cell.items():
        auto = found.get(OVER)
        if auto is None:
            continue
        same = (found.get(name) for name in SAME_LAYOUTS)
        predicted = found.get("predicted over measured")
        ms = found[AUTO].value if AUTO in found else None
        yield (
            cell, f"{ms:.1f}" if ms else "-",
            spread(auto) + (" (missed)" if auto.misses else ""), auto.note, *(spread(one) for one in same),
            spread(predicted), auto.when, f"{auto.load:.0f}",
        )  # fmt: skip


HEADERS = ("cell", "auto ms", OVER, "that peer", *SAME_LAYOUTS, "predicted over measured", "measured", "load")


def spread(one: Figure | None) -> str:
    """The value and its interval."""
    if one is None or one.value is None:
        return "-"
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})" if one.low != one.high else f"{one.value:.2f}"


def not_run(kept: Sequence[Figure]) -> Iterator[str]:
    """The ways that did not run, each with the cells and the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in kept:
        if one.value is None:
            reasons.setdefault((one.name, one.note), []).append(one.cell)
    for (name, note), found in reasons.items():
        yield f"- {name} ({'; '.join(found)}): {note}"
