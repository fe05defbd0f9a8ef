"""``python -m bench.known_plans [NAME ...]``: the bytes and costs of known plans, and of the plans that fxshard finds in the same settings.

Bytes are those that a rank sends in one step, forward and backward. "formula" is exact (``bench.known_plans.formulas``); "papers leave out"
is the part of the formula that the papers do not count; "known" is the plan with the known layouts pinned, which must send exactly the
formula's bytes; "found" is the plan without pins. ``--details`` adds each formula's terms and the difference between the two plans.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from tabulate import tabulate

import fxshard
from bench.known_plans.compare import Compared, compared, traffic
from bench.known_plans.settings import SETTINGS

HEADERS = ("plan", "mesh", "formula MB", "papers leave out", "known MB", "found MB", "known costs", "found costs", "ratio", "gap", "s")


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns 1 if a known plan does not send the bytes of its formula, or costs less than the plan found."""
    parser = argparse.ArgumentParser(prog="python -m bench.known_plans", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"settings; default: all of {', '.join(SETTINGS)}")
    parser.add_argument("--details", action="store_true")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in SETTINGS]
    if unknown:
        parser.error(f"no setting {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    rows, wrong = [], []
    for name in chosen.names or SETTINGS:
        start = time.process_time()
        result = compared(SETTINGS[name]())
        rows.append(_row(result, time.process_time() - start))
        wrong += _wrong(result)
        if chosen.details:
            print(_details(result), end="\n\n")
    print(tabulate(rows, headers=HEADERS, disable_numparse=True, colalign=("left", "left", *["right"] * (len(HEADERS) - 2))))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _row(result: Compared, seconds: float) -> tuple[str, ...]:
    setting, known, found = result.setting, result.known, result.found
    ratio = found.objective / known.objective
    return (
        setting.name,
        str(setting.mesh),
        f"{_total(t.bytes for t in setting.terms):.3f}",
        f"{_total(t.bytes for t in setting.terms if not t.paper):.3f}",
        f"{_total(c.bytes for c in known.collectives):.3f}",
        f"{_total(c.bytes for c in found.collectives):.3f}",
        _cost(known),
        _cost(found),
        f"{ratio:.4f}",
        f"{found.gap:.2%}",
        f"{seconds:.1f}",
    )


def _total(sizes: Iterable[int]) -> float:
    """Megabytes."""
    return sum(sizes) / 1e6


def _cost(plan: fxshard.ShardingPlan) -> str:
    return f"{plan.objective:,.0f} us" if plan.certificate.unit == "microseconds" else f"{plan.objective / 1e6:,.3f} MB"


def _wrong(result: Compared) -> list[str]:
    name, said = result.setting.name, []
    if not result.exact:
        said.append(f"{name}: the known plan sends {traffic(result.known)}, the formula says {result.formula}")
    if not result.no_worse:
        said.append(f"{name}: the plan found costs {result.found.objective / result.known.objective:.4f} times the known one")
    return said


def _details(result: Compared) -> str:
    setting = result.setting
    terms = [(t.what, t.kind, t.axis, t.count, f"{t.bytes:,}", "" if t.paper else "left out") for t in setting.terms]
    limit = "" if setting.memory_limit is None else f", at most {setting.memory_limit:,} bytes (optimizer: {setting.optimizer})"
    head = f"{setting.name}: {setting.best}\n{setting.mesh}, tokens {setting.inputs}, objective {setting.objective}{limit}"
    table = tabulate(terms, headers=("formula", "kind", "axis", "collectives", "bytes", "by papers"), disable_numparse=True)
    return f"{head}\n\n{table}\n\nfrom the known plan to the one found:\n{fxshard.diff(result.known, result.found)}"


if __name__ == "__main__":
    sys.exit(main())
