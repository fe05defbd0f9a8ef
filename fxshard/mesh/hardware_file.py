"""Hardware as JSON: the file that ``fxshard calibrate`` writes, and the hardware field of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fxshard.errors import OptionError, closest
from fxshard.files import Field, Readers, atomic_file, parse_json, read_bytes, write_json
from fxshard.mesh.architectures import ARCHITECTURES
from fxshard.mesh.hardware import HARDWARE, Curve, Efficiency, Hardware, Link, Measured

K = TypeVar("K")
FORMAT, VERSION = "fxshard-hardware", 1
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
ITEMSIZES = (1, 2, 4, 8, 16)
FIX = "correct this field, or make the file again"
MAKE = "give a file that fxshard calibrate -o wrote"


def find_hardware(hardware: str | Path | Hardware) -> Hardware:
    """The preset of that name, or the hardware in that file. Raises OptionError (with the closest preset) or FileError."""
    if isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, Path) or (isinstance(hardware, str) and is_file_name(hardware)):
        return load(hardware)
    if not isinstance(hardware, str) or hardware not in HARDWARE:
        what = f"unknown hardware {hardware!r}{closest(hardware, HARDWARE)}"
        remedy = f"presets are {', '.join(HARDWARE)}; or give a file that fxshard calibrate wrote (its name ends in .json)"
        raise OptionError(what, where="hardware", remedy=remedy)
    return HARDWARE[hardware]


def is_file_name(text: str) -> bool:
    """Whether ``text`` names a file and not a preset: it ends in .json or contains a path separator."""
    return text.endswith(".json") or "/" in text or "\\" in text


def save(hardware: Hardware, path: str | Path, made: Mapping[str, str] | None = None, errors: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes a hardware file atomically; raises FileError if ``path`` cannot be written.

    ``made``: what was measured and how; ``errors``: predictions against measurements. Both are for people; ``load`` ignores them.
    """
    fields = {"format": FORMAT, "version": VERSION, "made": dict(made or {}), **write_hardware(hardware), "errors": list(errors)}
    text = write_json(fields)
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def load(path: str | Path) -> Hardware:
    """Reads a hardware file; raises FileError with the file, the field, the problem and the remedy."""
    root = parse_json(read_bytes(path), str(path), MAKE)
    remedy = f"measure again with fxshard calibrate, or read it with the fxshard that wrote it; this one reads version {VERSION}"
    root.check_version(FORMAT, VERSION, "hardware file", MAKE, remedy)
    return _read_numbers(root, ("format", "version", "made", "errors"))


def write_hardware(h: Hardware) -> dict[str, Any]:
    """``h`` as JSON fields; absent optional parts are omitted."""
    out: dict[str, Any] = {
        "name": h.name,
        "flops": {str(size): float(h.flops[size]) for size in sorted(h.flops)},
        "memory_bandwidth": float(h.memory_bandwidth),
        "launch": float(h.launch),
        "node_size": h.node_size,
        "inside": _write_speed(h.inside),
        "between": None if h.between is None else _write_speed(h.between),
    }
    if h.axes:
        out["axes"] = {name: _write_speed(h.axes[name]) for name in sorted(h.axes)}
    if h.overlap:
        out["overlap"] = float(h.overlap)
    if h.host is not None:
        out["host"] = _write_speed(h.host)
    if h.architecture:
        out["architecture"] = h.architecture
    if h.memory is not None:
        out["memory"] = float(h.memory)
    if h.measured.products:
        out["products"] = [{"dtype": dtype, "points": _write_curve(h.measured.products[dtype])} for dtype in sorted(h.measured.products)]
    if h.measured.copy is not None:
        out["copy"] = _write_curve(h.measured.copy)
    if h.measured.efficiency:
        out["efficiency"] = {kind: _write_speed(h.measured.efficiency[kind]) for kind in sorted(h.measured.efficiency)}
    if h.measured.collectives:
        curves = sorted(h.measured.collectives.items())
        out["collectives"] = [{"kind": k, "size": n, "stride": s, "points": _write_curve(curve)} for (k, n, s), curve in curves]
    return out


def _write_speed(speed: Link | Efficiency) -> dict[str, float]:
    return {"bandwidth": float(speed.bandwidth), "latency": float(speed.latency)}


def _write_curve(curve: Curve) -> list[list[float]]:
    return [[int(size), float(time)] for size, time in curve.points]


def read_hardware(field: Field) -> Hardware:
    """Reads the hardware field of a plan: a preset's name, or all numbers."""
    if isinstance(field.value, str):
        if field.value not in HARDWARE:
            remedy = f"presets are {', '.join(HARDWARE)}; other hardware is written with its numbers"
            raise field.fail(f"unknown hardware {field.value!r}", remedy)
        return HARDWARE[field.value]
    return _read_numbers(field)


def _read_numbers(field: Field, beside: tuple[str, ...] = ()) -> Hardware:
    needed: Readers = {
        "name": Field.text,
        "flops": _read_flops,
        "memory_bandwidth": _read_positive,
        "launch": _read_non_negative,
        "node_size": lambda f: f.whole(1),
        "inside": _read_link,
        "between": lambda f: f.optional(_read_link),
    }
    free: Readers = {
        "axes": lambda f: {name: _read_link(link) for name, link in f.entries().items()},
        "overlap": _read_fraction,
        "host": _read_link,
        "architecture": _read_architecture,
        "memory": _read_positive,
    }
    measured: Readers = {
        "products": lambda f: _read_curves(f, _read_product),
        "copy": _read_curve,
        "efficiency": lambda f: {_checked_kind(kind, one): _read_efficiency(one) for kind, one in f.entries().items()},
        "collectives": lambda f: _read_curves(f, _read_collective),
    }
    said = field.record(needed, {**free, **measured, **dict.fromkeys(beside, Field.plain)})
    curves = {name: said[name] for name in measured if name in said}
    return Hardware(**{name: one for name, one in said.items() if name in needed or name in free}, measured=Measured(**curves))


def _read_architecture(field: Field) -> str:
    name = field.text()
    if name not in ARCHITECTURES:
        raise field.fail(f"unknown architecture {name!r}{closest(name, ARCHITECTURES)}", f"architectures are {', '.join(ARCHITECTURES)}")
    return name


def _read_flops(field: Field) -> dict[int, float]:
    entries = field.entries()
    for size, entry in entries.items():
        if size not in map(str, ITEMSIZES):
            raise entry.fail(f"{size!r} is not the size of an element in bytes", FIX)
    return {int(size): _read_positive(entry) for size, entry in entries.items()}


def _read_link(field: Field) -> Link:
    return Link(**field.record({"bandwidth": _read_positive, "latency": _read_non_negative}))


def _read_curves(field: Field, read: Callable[[Field], tuple[K, Curve]]) -> dict[K, Curve]:
    out: dict[K, Curve] = {}
    for item in field.items():
        key, curve = read(item)
        if key in out:
            raise item.fail(f"there are two curves for {key}", FIX)
        out[key] = curve
    return out


def _checked_kind(text: str, field: Field) -> str:
    if text not in KINDS:
        raise field.fail(f"unknown collective {text!r}{closest(text, KINDS)}", f"collectives are {', '.join(KINDS)}")
    return text


def _read_efficiency(field: Field) -> Efficiency:
    return Efficiency(**field.record({"bandwidth": _read_positive, "latency": _read_non_negative}))


def _read_product(field: Field) -> tuple[str, Curve]:
    dtype, points = field.record({"dtype": Field.text, "points": _read_curve}).values()
    return dtype, points


def _read_collective(field: Field) -> tuple[tuple[str, int, int], Curve]:
    readers: Readers = {"kind": Field.text, "size": lambda f: f.whole(2), "stride": lambda f: f.whole(1), "points": _read_curve}
    kind, size, stride, points = field.record(readers).values()
    return (_checked_kind(kind, field), size, stride), points


def _read_curve(field: Field) -> Curve:
    """Points with increasing sizes and non-decreasing times, the last time above the first."""
    points = tuple((size.whole(), _read_non_negative(time)) for size, time in (point.items(2) for point in field.items()))
    if len(points) < 2:
        raise field.fail(f"a curve has at least two points, found {len(points)}", FIX)
    for (size, time), (larger, longer) in itertools.pairwise(points):
        if larger <= size or longer < time:
            raise field.fail(f"the points ({size}, {time:g}) and ({larger}, {longer:g}) do not ascend", FIX)
    if points[-1][1] == points[0][1]:
        raise field.fail("all sizes take the same time", FIX)
    return Curve(points)


def _read_non_negative(field: Field) -> float:
    return field.figure()


def _read_fraction(field: Field) -> float:
    share = _read_non_negative(field)
    if share > 1:
        raise field.fail(f"a fraction is at most 1, found {share:g}", FIX)
    return share


def _read_positive(field: Field) -> float:
    rate = _read_non_negative(field)
    if not rate:
        raise field.fail("a rate is positive, found 0", FIX)
    return rate
