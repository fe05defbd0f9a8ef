"""Fits ``Hardware`` to measurements, and reports its prediction errors on held-out measurements.

Times of matrix products and copies become curves over FLOP and bytes, those of each collective on each axis a curve over the bytes
sent. For groups that were not measured, least squares (Levenberg-Marquardt) fits links to all collectives at once, then each kind's
efficiency on these links. Residuals are logarithms of times, so that a factor of two counts the same at a kilobyte and at a gigabyte.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fxshard.cost.collectives import collective_time, modelled_time_by_bytes
from fxshard.cost.compute import flops_of
from fxshard.cost.timeline import unsharded_time
from fxshard.errors import RunError
from fxshard.graph.call import Call
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.mesh.hardware import Curve, Efficiency, Hardware, Link
from fxshard.mesh.mesh import Mesh, Span

COPY = "aten.clone.default"
MIN_TIME = 1e-3
"""Lower bound, in microseconds, on a measured time less the launch, and on a link's latency."""

FIT_STEPS = 100
MIN_RISE = 1e-3
"""Least relative increase of a collective's time from the smallest size to the largest; less is noise."""


@dataclass(frozen=True)
class OpTime:
    """Measured microseconds of one operator on whole tensors, launch included; ``fitted``: used for the fit, else held out."""

    name: str
    call: Call
    time: float
    fitted: bool


@dataclass(frozen=True)
class CollectiveTime:
    """Measured microseconds of one collective in which each rank sends ``sent`` bytes (of the ring algorithm): on an axis of the mesh that
    was measured, or on a ``group`` of (size, stride) ranks from elsewhere, which has no mesh."""

    kind: str
    axis: int
    sent: int
    time: float
    fitted: bool
    group: tuple[int, int] | None = None

    def place(self, mesh: Mesh, hardware: Hardware) -> tuple[Mesh, int]:
        """(a mesh on ``hardware``, its axis) with such groups; ``mesh``: that of ``axis``."""
        if self.group is None:
            return Mesh(_axes(mesh), hardware), self.axis
        size, stride = self.group
        return Mesh({"group": size, "between": stride}, hardware), 0

    def name(self, mesh: Mesh) -> str:
        if self.group is None:
            return f"{self.kind} on {mesh.axis_names[self.axis]}"
        size, stride = self.group
        return f"{self.kind} on {size} ranks" + (f", {stride} apart" if stride > 1 else "")


@dataclass(frozen=True)
class PredictionErrors:
    """Relative errors of predictions (0.1: predicted 10 % too long), each with its size in bytes or FLOP."""

    what: str
    errors: tuple[float, ...]
    sizes: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(map(abs, self.errors))

    @property
    def worst(self) -> tuple[float, float]:
        """(signed error, size) of the largest absolute error."""
        return max(zip(self.errors, self.sizes, strict=True), key=lambda pair: abs(pair[0]))


def fit_device(base: Hardware, ops: Sequence[OpTime], launch: float) -> Hardware:
    """``base`` with rates and curves fitted to the matrix products and copies in ``ops``."""
    products: dict[str, list[tuple[int, float]]] = {}
    copies = []
    best: dict[int, float] = {}
    for one in (one for one in ops if one.fitted):
        time, meta = max(one.time - launch, MIN_TIME), one.call.operands[0]
        if one.call.op == COPY:
            copies.append((2 * math.prod(meta.shape) * meta.dtype.itemsize, time))
        else:
            flops = int(_flops(one.call))
            products.setdefault(str(meta.dtype).removeprefix("torch."), []).append((flops, time))
            best[meta.dtype.itemsize] = max(best.get(meta.dtype.itemsize, 0.0), flops / time * 1e6)
    copy = lower_envelope(copies)
    size, time = copy.points[-1]
    measured = replace(base.measured, products={dtype: lower_envelope(points) for dtype, points in products.items()}, copy=copy)
    return replace(base, flops=best, memory_bandwidth=size / time * 1e6, launch=launch, measured=measured)


def fit_links(mesh: Mesh, times: Sequence[CollectiveTime], keep: bool = False) -> Hardware:
    """The hardware of ``mesh`` with links and curves fitted to the collectives in ``times``.

    A link that no collective crosses stays that of ``mesh`` with ``keep``. Without it, ``between`` is then None, and ``inside`` equals
    ``between``: the links of a preset say nothing of the machine that was measured.
    Ignores collectives whose times do not grow with the bytes (``noisy_collectives``): the links fitted to the others price them.
    Raises RunError if there are no others.
    """
    curves = {key: isotonic(found) for key, found in _points(mesh, times).items() if key[0] in COLLECTIVES and _rises(found)}
    hidden = set(noisy_collectives(mesh, times))
    fitted = [one for one in times if one.fitted and one.name(mesh) not in hidden]
    if not fitted:
        raise RunError("no collective takes longer with more bytes", remedy="measure again on a less busy machine")
    inside, between = _links(mesh, fitted, keep)
    plain = replace(mesh.hardware, inside=inside, between=between)
    kinds = {kind: [one for one in fitted if one.kind == kind] for kind in COLLECTIVES}
    efficiency = {kind: _efficiency(mesh, plain, of_kind) for kind, of_kind in kinds.items() if of_kind}
    return replace(plain, measured=replace(plain.measured, collectives=curves, efficiency=efficiency))


def noisy_collectives(mesh: Mesh, times: Sequence[CollectiveTime]) -> list[str]:
    """Names (kind and axis) of the collectives in ``times`` whose times do not grow with the bytes, because of noise."""
    flat = {key for key, found in _points(mesh, times).items() if not _rises(found)}
    found = ((one, _span(mesh, one)) for one in times)
    return sorted({one.name(mesh) for one, span in found if (one.kind, span.size, span.stride) in flat})


def _span(mesh: Mesh, one: CollectiveTime) -> Span:
    place, axis = one.place(mesh, mesh.hardware)
    return place.span(axis)


def _points(mesh: Mesh, times: Iterable[CollectiveTime]) -> dict[tuple[str, int, int], list[tuple[int, float]]]:
    """(bytes, microseconds) of the fitted measurements, by kind, size and stride of the group."""
    points: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for one in (one for one in times if one.fitted):
        span = _span(mesh, one)
        if span.per_node is not None:
            points.setdefault((one.kind, span.size, span.stride), []).append((one.sent, one.time))
    return points


def _rises(points: Sequence[tuple[int, float]]) -> bool:
    times = _isotonic(points)[1]
    return times[-1] >= times[0] * (1 + MIN_RISE)


def drop_collective_curves(hardware: Hardware) -> Hardware:
    """``hardware`` without its curves of collectives, as it prices groups that were not measured."""
    return replace(hardware, measured=replace(hardware.measured, collectives={}))


def op_errors(hardware: Hardware, ops: Iterable[OpTime]) -> list[PredictionErrors]:
    """Errors on the held-out operators, by name; a prediction is the launch plus ``compute_time``."""
    mesh = Mesh({"one": 1}, hardware)
    found = [(one.name, _flops(one.call), hardware.launch + unsharded_time(one.call, mesh), one.time) for one in ops if not one.fitted]
    return _errors(found)


def collective_errors(hardware: Hardware, mesh: Mesh, times: Iterable[CollectiveTime]) -> list[PredictionErrors]:
    """Errors on the held-out collectives, by kind and axis."""
    rows = []
    for one in (one for one in times if not one.fitted):
        place, axis = one.place(mesh, hardware)
        rows.append((one.name(mesh), float(one.sent), collective_time(one.kind, axis, one.sent, place), one.time))
    return _errors(rows)


def _errors(rows: Iterable[tuple[str, float, float, float]]) -> list[PredictionErrors]:
    """From (what, size, predicted, measured)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for what, size, predicted, time in rows:
        found.setdefault(what, []).append((predicted / time - 1, size))
    return [PredictionErrors(what, tuple(e for e, _ in pairs), tuple(s for _, s in pairs)) for what, pairs in found.items()]


def lower_envelope(points: Iterable[tuple[int, float]]) -> Curve:
    """The highest non-decreasing curve that is nowhere above the measurements: disturbances only ever lengthen a measurement."""
    ordered = sorted(points)
    times = list(itertools.accumulate((time for _, time in reversed(ordered)), min))[::-1]
    return _curve([size for size, _ in ordered], times)


def isotonic(points: Iterable[tuple[int, float]]) -> Curve:
    """Isotonic regression: the non-decreasing curve closest to the measurements in least squares, for medians, which err both ways.

    Raises RunError if the curve is constant.
    """
    return _curve(*_isotonic(points))


def _isotonic(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """(sizes, times) by pool adjacent violators (Ayer et al. 1955): neighbours out of order are pooled to their mean."""
    sizes, means = list[int](), list[tuple[float, int]]()  # (mean, number of pooled neighbours)
    for size, time in sorted(points):
        sizes.append(size)
        means.append((time, 1))
        while len(means) > 1 and means[-2][0] > means[-1][0]:
            (a, m), (b, n) = means[-2:]
            means[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return sizes, [mean for mean, n in means for _ in range(n)]


def _curve(sizes: Sequence[int], times: Sequence[float]) -> Curve:
    if times[0] == times[-1]:
        what = f"{len(sizes)} measurements of sizes from {sizes[0]} to {sizes[-1]} do not take longer as the size grows"
        raise RunError(what, remedy="measure again on a less busy machine")
    return Curve(tuple(zip(sizes, times, strict=True)))


def _flops(call: Call) -> float:
    return flops_of(call, [m.shape for m in call.operands], [m.shape for m in call.outputs if m is not None])


def _links(mesh: Mesh, times: Sequence[CollectiveTime], keep: bool) -> tuple[Link, Link | None]:
    """Fitted (inside, between). ``keep``: what no collective crosses stays; else between is None if no axis crosses nodes, and inside
    equals between if every axis has each rank on its own node."""
    spans = [_span(mesh, one) for one in times]
    h = mesh.hardware
    crossed = [any(s.per_node != 1 for s in spans), any(not s.is_inside for s in spans)]
    starts = [link or h.inside for link in (h.inside, h.between)]
    free = [i for i in (0, 1) if crossed[i]]

    def links(logarithms: np.ndarray) -> list[Link]:
        out = list(starts)
        for k, i in enumerate(free):
            latency, pace = np.exp(logarithms[2 * k : 2 * k + 2])
            out[i] = Link(float(1 / pace), float(latency))
        return out

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return _residuals(mesh, replace(h, inside=links(logarithms)[0], between=links(logarithms)[1]), times)

    start = np.log([number for i in free for number in (max(starts[i].latency, MIN_TIME), 1 / starts[i].bandwidth)])
    inside, between = links(_least_squares(residuals, start))
    if keep:
        return inside, between if crossed[1] else h.between
    return inside if crossed[0] else between, between if crossed[1] else None


def _efficiency(mesh: Mesh, hardware: Hardware, times: Sequence[CollectiveTime]) -> Efficiency:
    """The efficiency of one kind of collective, fitted on top of the links of ``hardware``."""

    def reached(logarithms: np.ndarray) -> Efficiency:
        latency, pace = np.exp(logarithms)
        return Efficiency(float(latency), float(1 / pace))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        measured = replace(hardware.measured, efficiency={times[0].kind: reached(logarithms)})
        return _residuals(mesh, replace(hardware, measured=measured), times)

    return reached(_least_squares(residuals, np.zeros(2)))


def _residuals(mesh: Mesh, hardware: Hardware, times: Sequence[CollectiveTime]) -> np.ndarray:
    """Logarithms of predicted over measured times, without measured curves."""
    paces: dict[tuple[str, int, tuple[int, int] | None], Callable[[float], float]] = {}
    for one in times:
        key = one.kind, one.axis, one.group
        if key not in paces:
            place, axis = one.place(mesh, hardware)
            paces[key] = modelled_time_by_bytes(place, one.kind, axis)
    return np.log([paces[one.kind, one.axis, one.group](one.sent) / one.time for one in times])


def _axes(mesh: Mesh) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Minimises the sum of squares from ``start`` by Levenberg-Marquardt with finite differences."""
    at, damping, step = start, 1e-2, 1e-5
    now = residuals(at)
    for _ in range(FIT_STEPS):
        slopes = np.stack([(residuals(at + step * e) - now) / step for e in np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        move = np.linalg.lstsq(square + damping * np.diag(np.diag(square)), slopes.T @ now, rcond=None)[0]
        to = at - np.clip(move, -2.0, 2.0)
        there = residuals(to)
        if there @ there < now @ now:
            at, now, damping = to, there, damping / 3
        else:
            damping *= 4
    return at


DIGITS = 5
"""Significant digits of the numbers in a file of measured hardware."""


def rounded(hardware: Hardware) -> Hardware:
    """``hardware`` rounded to the significant digits that a measurement has, for a file that people read."""
    found: Hardware = _rounded(hardware)
    return found


def _rounded(value: Any) -> Any:
    """``value`` with each float in it, however deep, rounded."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rounded(getattr(value, f.name)) for f in fields(value)})
    return value
