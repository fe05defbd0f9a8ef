"""``python -m bench.published [--data DIR] [collectives|steps|fit ...]``: predicted over measured, for every published row.

DIR (default: the value of FXSHARD_DATA) has collectives.csv and steps.csv, or a folder ``published`` with them. Returns 1 if a row is
outside of its bounds: steps 0.85 to 1.15, their median 0.95 to 1.05; collectives 0.8 to 1.25 above 1 MiB, else 0.6 to 1.6.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import warnings
from dataclasses import fields
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from bench.published import fit, rows
from bench.published.collective_time import predicted as collective_time

PARTS = ("collectives", "steps", "fit", "sustained", "inductor")
MIB = 1 << 20
STEP, MEDIAN, LARGE, SMALL = (0.85, 1.15), (0.95, 1.05), (0.8, 1.25), (0.6, 1.6)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.published", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: the first two)")
    parser.add_argument("--data", default=os.environ.get("FXSHARD_DATA"), metavar="DIR", help="default: FXSHARD_DATA")
    options = parser.parse_args(arguments)
    if not options.data:
        print("name the folder of the measurements: --data DIR, or FXSHARD_DATA=DIR", file=sys.stderr)
        return 2
    data = Path(options.data)
    data = data if (data / "steps.csv").is_file() else data / "published"
    wrong = 0
    for part in options.parts or PARTS[:2]:
        if part not in PARTS:
            parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
        wrong += {"collectives": _collectives, "steps": _steps, "fit": _fit, "sustained": _sustained, "inductor": _inductor}[part](data)
    return int(wrong > 0)


def _collectives(data: Path) -> int:
    found = [(one, collective_time(one)) for one in rows.published(data)]
    ratios = [time / one.measured for one, time in found]
    bounds = [LARGE if one.size > MIB else SMALL for one, _ in found]
    outside = [not low <= ratio <= high for ratio, (low, high) in zip(ratios, bounds, strict=True)]
    table = [
        (one.kind, one.device, one.ranks, one.nodes, one.size, one.measured, time, ratio, "outside" if wrong else "")
        for (one, time), ratio, wrong in zip(found, ratios, outside, strict=True)
    ]
    headers = ("collective", "device", "ranks", "nodes", "bytes", "measured us", "predicted us", "ratio", "")
    print(tabulate(table, headers=headers, floatfmt=("", "", "", "", "", ".1f", ".1f", ".3f", "")))
    print(f"{len(found)} collectives: median {statistics.median(ratios):.3f}, {sum(outside)} outside\n")
    return sum(outside)


def _fit(data: Path) -> int:
    """Prints the constants of NCCL's model fitted to all collectives, and to all but one source with what they predict for that one."""
    found = rows.published(data)
    table: list[tuple[object, ...]] = [("no source", *(f"{v:.3g}" for v in fit.fitted(found).values()), None, None)]
    for source, (constants, unknown, ratios) in fit.left_out(found).items():
        table.append((source, *(f"{v:.3g}{' *' * (name in unknown)}" for name, v in constants.items()), min(ratios), max(ratios)))
    print(
        tabulate(
            table,
            headers=("left out", *fit.NEUTRAL, "least ratio", "largest"),
            floatfmt=".3g",
            disable_numparse=range(1, 1 + len(fit.NEUTRAL)),
        )
    )
    print("* not determined: with these values no row of the other sources depends on it")
    print(f"{len(fit.NEUTRAL)} constants, {len(found)} points\n")
    return 0


def _steps(data: Path) -> int:
    from bench.published.step_time import StepTime, predicted

    found = [(one, predicted(one)) for one in tqdm(rows.steps(data), disable=None)]
    ratios = [time.total / 1000 / one.measured for one, time in found]
    outside = [not STEP[0] <= ratio <= STEP[1] for ratio in ratios]
    parts = [part.name for part in fields(StepTime) if part.name != "again"]
    table = [
        (
            one.model,
            one.device,
            one.mesh,
            one.measured,
            time.total / 1000,
            ratio,
            *(getattr(time, p) / 1000 for p in parts),
            "outside" if w else "",
        )
        for (one, time), ratio, w in zip(found, ratios, outside, strict=True)
    ]
    headers = ("model", "device", "mesh", "measured ms", "predicted ms", "ratio", *parts, "")
    print(tabulate(table, headers=headers, floatfmt=("", "", "", ".0f", ".0f", ".3f", *[".0f"] * len(parts), "")))
    median = statistics.median(ratios)
    print(f"{len(found)} steps: median {median:.3f}, {sum(outside)} outside\n")
    return sum(outside) + (not MEDIAN[0] <= median <= MEDIAN[1])


def _sustained(data: Path) -> int:
    """Prints the rate that products sustain in a step, fitted to all steps and to all but those of one source, and what it predicts."""
    from bench.published import sustained

    found = sustained.predictions(data)
    table = [("no source", sustained.fitted(found), len(found), *sustained.spread(found, sustained.fitted(found)))]
    for source, (rate, own) in sustained.left_out(found).items():
        table.append((source, rate, len(own), *sustained.spread(own, rate)))
    print(tabulate(table, headers=("left out", "rate", "steps", "least ratio", "median", "largest"), floatfmt=".2f"))
    return 0


def _inductor(data: Path) -> int:
    """Prints Inductor's estimates of the collectives beside ours, by group and by whether they are above 1 MiB."""
    from bench.published import inductor

    found = rows.published(data)
    for name, estimates in (("formulas", inductor.analytic(found)), ("from a trace with every other size", list(inductor.guided(found)))):
        groups: dict[tuple[str, str, int, str], list[inductor.Estimates]] = {}
        for one in estimates:
            size = "above 1 MiB" if one.row.size > MIB else "to 1 MiB"
            groups.setdefault((one.row.kind, one.row.device, one.row.ranks, size), []).append(one)
        table = [
            (*key, len(ones), *_spread([one.ours for one in ones]), *_spread([one.theirs for one in ones]))
            for key, ones in sorted(groups.items())
        ]
        headers = (
            "collective",
            "device",
            "ranks",
            "sizes",
            "rows",
            "ours: least",
            "median",
            "largest",
            "Inductor: least",
            "median",
            "largest",
        )
        print(f"{name}, over measured:\n{tabulate(table, headers=headers, floatfmt='.2f')}\n")
    return 0


def _spread(ratios: list[float]) -> tuple[float, float, float]:
    return min(ratios), statistics.median(ratios), max(ratios)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
