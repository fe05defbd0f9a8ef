"""Presents a calibration: rates, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxshard.cost.fit import PredictionErrors
from fxshard.mesh.hardware import Hardware


@dataclass(frozen=True)
class Calibration:
    """The hardware fitted to measurements, and its errors at sizes that were not used for fitting.

    ``made``: what was measured and how. ``ops``: errors by operator; with ``fitted_ops`` of those that the rates were fitted to.
    ``curves``: by collective, errors of the measured curves, which price groups of the same size and stride. ``links``: by collective,
    errors of the link formulas, which price all other groups.
    """

    hardware: Hardware
    made: Mapping[str, str]
    ops: tuple[PredictionErrors, ...]
    curves: tuple[PredictionErrors, ...] = ()
    links: tuple[PredictionErrors, ...] = ()
    fitted_ops: bool = False


def report(calibration: Calibration) -> str:
    """The rates found, and a table of errors for operators, for measured groups and for the links."""
    parts = [_rates(calibration)]
    if "links" in calibration.made:
        parts.append(f"links: {calibration.made['links']} (measure them with --mesh, for example --mesh tp=2)")
    if "left out" in calibration.made:
        parts.append(f"left out: {calibration.made['left out']}")
    on = "the operators that the rates were fitted to" if calibration.fitted_ops else "sizes that nothing was fitted to"
    tables = (
        (f"prediction against measurement, on {on}:", calibration.ops, "FLOPs"),
        ("collectives, by the curves that price groups of this size and stride:", calibration.curves, "bytes sent"),
        ("the same by the links, which price all other groups:", calibration.links, "bytes sent"),
    )
    return "\n\n".join([*parts, *(f"{title}\n{_table(errors, unit)}" for title, errors, unit in tables if errors)])


def _rates(calibration: Calibration) -> str:
    h = calibration.hardware
    rates = [("launch", f"{h.launch:.3g} us"), ("copy, largest size", f"{h.memory_bandwidth / 1e9:.3g} GB/s")]
    rates += [(f"product, {size} bytes an element", f"{rate / 1e9:.4g} GFLOP/s") for size, rate in sorted(h.flops.items())]
    for name, link in (("inside a node", h.inside), ("between nodes", h.between)) if calibration.links else ():
        if link is not None:
            rates.append((f"link {name}", f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency:.3g} us a hop"))
    return tabulate(rates, tablefmt="plain")


def _table(errors: Sequence[PredictionErrors], unit: str) -> str:
    rows = [(e.what, len(e.errors), f"{e.median:.0%}", f"{e.worst[0]:+.0%}", f"{e.worst[1]:.3g}") for e in errors]
    headers = ("", "points", "median error", "worst", f"at {unit}")
    return tabulate(rows, headers=headers, colalign=("left", "right", "right", "right", "right"))


def file_rows(calibration: Calibration) -> list[dict[str, Any]]:
    """The errors as rows of a hardware file."""
    kinds = (("operators", calibration.ops), ("curves", calibration.curves), ("links", calibration.links))
    return [
        {"of": kind, "what": e.what, "points": len(e.errors), "median": round(e.median, 4), "worst": round(e.worst[0], 4)}
        for kind, errors in kinds
        for e in errors
    ]
