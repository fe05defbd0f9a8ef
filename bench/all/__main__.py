"""``python -m bench.all`` (``make bench``): all benches in one run of at most ``--minutes``, compared with the figures kept before.

One clock runs for all, calibration too. Each part has its share of the time and starts no cell after it, except one where an earlier part
overran. Cells that were measured longest ago come first, so runs take turns where the time does not suffice for all. After each cell its
figures are written to ``--results``, and the tables of ``--page`` are made from that file.

The exit code is 1 if a figure is a slowdown beyond noise: its 95 % interval lies above the kept one's, and its value is larger by more than
5 % (ratios of times), 15 % (processor time and memory of planning), 0.5 % (cost of a solve with a time limit) or 0.1 % (what no clock
enters). The last are compared everywhere, the others only with those of the same processor, cores and torch. A new figure is compared with
a reference, which only one that is faster beyond noise replaces, or any with ``--accept``; a slower one is not kept. The exit code is also
1 if a cell raises, if fxshard's own choice gives no value, or if what had a value on this machine has none now. A figure that misses its
goal is printed, and does not change the exit code.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench.all import page, planning, plans, small, solver, steps
from bench.all.figures import COMPUTED, Cell, Figure, Kept, broken, following, oldest_first, read, slower, write

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "benchmarks.md"
SHARES = {small.OVERHEAD: 0.02, small.MEMORY: 0.03, plans.PART: 0.08, planning.PART: 0.12, solver.PART: 0.15, steps.PART: 0.6}
"""The part of the time that each part gets, in the order in which they run: what the short ones overrun, the longest one lacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(SHARES), default=list(SHARES), metavar="PART", help=", ".join(SHARES))
    parser.add_argument("--cells", default="", metavar="TEXT", help="only cells whose names contain this")
    parser.add_argument("--minutes", type=float, default=36.0, help="nothing begins after this, calibration too (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small cell of each part but the solver; kept in a new folder")
    parser.add_argument("--hardware", metavar="NAME", help="for which fxshard plans the steps (default: measured by calibrate)")
    parser.add_argument(
        "--data", default=os.environ.get("FXSHARD_DATA"), metavar="DIR", help="the solver's instances; default: FXSHARD_DATA"
    )
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(HERE.parents[1])}")
    parser.add_argument("--page", type=Path, help=f"default: {PAGE.relative_to(HERE.parents[1])}")
    parser.add_argument("--accept", action="store_true", help="keep slower figures too")
    chosen = parser.parse_args(arguments)
    _place_files(chosen)
    kept, problems = read(chosen.results), list[str]()
    for part, end, last in _ends(chosen.parts, 60 * chosen.minutes):
        wanted = [cell for cell in _cells(part, chosen) if chosen.cells in cell.name]
        for cell in _before(end, last, oldest_first(wanted, kept)):
            problems += _measure(cell, kept, chosen.accept)
            write(chosen.results, kept)
            page.update(chosen.page, read(chosen.results))  # in the order of the file, as a later run makes the page
    for one in kept.values():
        if one.misses and one.part in chosen.parts:
            print(f"above its goal of {one.goal:g}: {one.part}, {one.cell}: {one.name} {one.value:.4g}")
    print(*problems, sep="\n")
    return int(bool(problems))


def _place_files(chosen: argparse.Namespace) -> None:
    """Sets ``results`` and ``page`` where they are not given: those of the repository, or for a quick run copies in a new folder."""
    results, text = RESULTS, PAGE
    if chosen.quick and not (chosen.results and chosen.page):
        folder = Path(tempfile.mkdtemp(prefix="bench-"))
        results, text = folder / RESULTS.name, Path(shutil.copy(PAGE, folder))
        print(f"a quick run: figures and page are in {folder}", flush=True)
    chosen.results, chosen.page = chosen.results or results, chosen.page or text


def _ends(parts: Collection[str], seconds: float) -> Iterator[tuple[str, float, float]]:
    """Each part with the time on the monotonic clock after which no cell of it begins, and the one after which nothing begins."""
    begun, total, passed = time.monotonic(), sum(SHARES[part] for part in set(parts)), 0.0
    for part in SHARES:
        if part in parts:
            passed += SHARES[part]
            yield part, begun + seconds * passed / total, begun + seconds


def _cells(part: str, chosen: argparse.Namespace) -> Iterator[Cell]:
    if part == steps.PART:
        yield from steps.cells(chosen.hardware or ("cpu" if chosen.quick else None), calibrated, chosen.quick)
    elif part == planning.PART:
        yield from planning.cells(chosen.quick)
    elif part == plans.PART:
        yield from plans.cells(chosen.quick)
    elif part == solver.PART:
        yield from () if chosen.quick else solver.cells(chosen.data)
        if missing := solver.missing(chosen.data):
            print(f"solver: no files of {', '.join(missing)} (--data DIR, or FXSHARD_DATA)")
    else:
        yield from small.overhead_cells() if part == small.OVERHEAD else small.memory_cells(chosen.quick)


@functools.cache
def calibrated(ranks: int) -> str:
    """A file of `fxshard calibrate` for this machine, measured at the first call (about a minute)."""
    from fxshard.cli.main import main as fxshard

    path = Path(tempfile.mkdtemp(), f"hardware.{ranks}.json")
    if fxshard(["calibrate", "--mesh", f"dp={ranks}", "-o", str(path)]):
        raise RuntimeError(f"fxshard calibrate --mesh dp={ranks} failed; its message is above")
    return str(path)


def _before(end: float, last: float, cells: Sequence[Cell]) -> Iterator[Cell]:
    """Cells until ``end``, and the first until ``last``, so that each part has a turn; names those that are left."""
    for place, cell in enumerate(cells):
        if time.monotonic() > (end if place else last):
            left = "; ".join(one.name for one in cells[place:])
            print(f"{cell.part}: {len(cells) - place} cells are left for the next run: {left}", flush=True)
            return
        yield cell


def _measure(cell: Cell, kept: Kept, accept: bool) -> list[str]:
    """Measures a cell, puts its figures in ``kept``, and says what is slower than before, or gives no value any more: then the cell's kept
    figures all stay. A cell that raises is a problem too."""
    load, begun = _load(), time.monotonic()
    try:
        found = [_signed(one, load) for one in cell.run()]
    except (Exception, SystemExit) as error:  # of any cell: the others go on
        return [f"{cell.part}, {cell.name}: {type(error).__name__}: {error}"]
    before = {key: one for key, one in kept.items() if key[:2] == (cell.part, cell.name)}
    lost = [f"{cell.part}, {cell.name}: {each}" for each in broken(found, before.values(), machine())]
    slow = {one.key: worse for one in found if (worse := slower(one, before.get(one.key)))}
    if accept or not lost:
        for key in before:
            del kept[key]  # also what was not found this time
        for one in found:
            old = before.get(one.key)
            kept[one.key] = one if accept else old if old and one.key in slow else following(one, old)
    problems = [*lost, *slow.values()]
    print(f"{cell.part}, {cell.name}: {time.monotonic() - begun:.0f} s{''.join(f'; {each}' for each in problems)}", flush=True)
    return problems


def _signed(one: Figure, load: float) -> Figure:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    where = "" if one.noise == COMPUTED else machine()  # what no clock enters can be compared everywhere
    value, low, high = (None if number is None else float(f"{number:.6g}") for number in (one.value, one.low, one.high))
    return replace(one, value=value, low=low, high=high, when=when, machine=where, load=load)


def machine() -> str:
    """Processor, cores and torch: figures are compared only where these are the same."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def _load() -> float:
    read: Callable[[], tuple[float, ...]] | None = getattr(os, "getloadavg", None)
    return round(read()[0], 1) if read else 0.0


if __name__ == "__main__":
    sys.exit(main())
