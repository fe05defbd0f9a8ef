"""Curves through measured points, and hardware files: saved, loaded, refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fxshard.errors import FileError, OptionError
from fxshard.layout import redistribution
from fxshard.mesh.hardware import HARDWARE, Curve, Hardware, Link, Measured
from fxshard.mesh.hardware_file import KINDS, find_hardware, load, save
from fxshard.mesh.mesh import Mesh, parse_mesh
from tests.plans.small_plans import curves, hardware

PRODUCT, COPY, REDUCTION = Curve(((1000, 1.0), (4000, 3.0))), Curve(((10, 1.0), (20, 2.0))), Curve(((8, 5.0), (16, 6.0)))
MEASURED = Measured({"float32": PRODUCT}, COPY, {("all_reduce", 2, 4): REDUCTION})
OWN = Hardware("own", {4: 1e12}, 1e11, 2.5, 8, Link(1e10, 1.0), None, {"dp": Link(1e9, 9.0)}, MEASURED, 0.75)
TEXT = """\
{
"format": "fxshard-hardware",
"version": 1,
"made": {"device": "a machine"},
"name": "own",
"flops": {"4": 1000000000000.0},
"memory_bandwidth": 100000000000.0,
"launch": 2.5,
"node_size": 8,
"inside": {"bandwidth": 10000000000.0, "latency": 1.0},
"between": null,
"axes": {"dp": {"bandwidth": 1000000000.0, "latency": 9.0}},
"overlap": 0.75,
"products": [
 {"dtype": "float32", "points": [[1000, 1.0], [4000, 3.0]]}
],
"copy": [[10, 1.0], [20, 2.0]],
"collectives": [
 {"kind": "all_reduce", "size": 2, "stride": 4, "points": [[8, 5.0], [16, 6.0]]}
],
"errors": []
}
"""


@given(curves, st.lists(st.floats(0, 2**61), max_size=8))
def test_a_curve_passes_through_its_points_and_never_decreases(curve: Curve, sizes: list[float]) -> None:
    assert [curve(size) for size, _ in curve.points] == pytest.approx([time for _, time in curve.points])
    times = [curve(size) for size in sorted([*sizes, *(size for size, _ in curve.points)])]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times)) and times[0] >= 0


def test_outside_of_its_points_a_curve_is_alpha_beta() -> None:
    curve = Curve(((1000, 60.0), (2000, 90.0), (3000, 100.0)))
    assert [curve(size) for size in (500, 1500, 2500, 5000)] == pytest.approx([50, 75, 95, 140])
    assert Curve(((1000, 1.0), (2000, 9.0)))(0) == 0, "never negative"


def test_golden_text(tmp_path: Path) -> None:
    save(OWN, tmp_path / "h.json", {"device": "a machine"})
    assert (tmp_path / "h.json").read_text() == TEXT
    assert load(tmp_path / "h.json") == OWN


def test_a_file_without_the_field_overlap_has_none(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(json.dumps(_with(overlap="absent")))
    assert load(tmp_path / "h.json").overlap == 0.0


@given(hardware)
def test_roundtrip(tmp_path_factory: pytest.TempPathFactory, own: Hardware) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.json"
    save(own, path, errors=[{"what": "copy", "median": 0.1}])
    assert load(path) == own


def test_a_file_works_wherever_hardware_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    save(OWN, path)
    for given_as in (path, str(path)):
        assert Mesh({"dp": 2, "tp": 4}, given_as) == Mesh({"dp": 2, "tp": 4}, OWN)
    assert parse_mesh("tp=2", str(path)).hardware == OWN and find_hardware("cpu") is HARDWARE["cpu"]


def test_an_unknown_preset_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"unknown hardware 'h10'; did you mean 'h100'\?[\s\S]*presets are h100[\s\S]*or give a file"):
        find_hardware("h10")
    for name in ("h10.json", "folder/h10", str(tmp_path)):
        with pytest.raises(FileError, match="cannot read the file"):
            find_hardware(name)


def _with(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (json.loads(TEXT) | changes).items() if value != "absent"}


def _points(*points: list[float]) -> dict[str, Any]:
    return _with(copy=list(points))


COLLECTIVE = {"kind": "all_reduce", "size": 2, "stride": 4, "points": [[8, 5.0], [16, 6.0]]}
BAD: list[tuple[Any, str, str]] = [
    ([], "not a fxshard hardware file", "h.json"),
    (_with(format="fxshard-plan"), "not a fxshard hardware file", "h.json"),
    (_with(version=2), "format version 2: a newer fxshard wrote it", "h.json"),
    (_with(flops="absent"), "the field 'flops' is missing", "h.json"),
    (_with(extra=1), "unknown field 'extra'", "h.json"),
    (_with(flops={"3": 1.0}), "'3' is not the size of an element", "flops.3"),
    (_with(memory_bandwidth=0), "a rate is positive, found 0", "memory_bandwidth"),
    (_with(inside=None), "expected an object, found null", "inside"),
    (_with(axes={"dp": {"bandwidth": 1}}), "the field 'latency' is missing", "axes.dp"),
    (_with(overlap=1.5), "at most 1, found 1.5", "overlap"),
    (_points([1, 1]), "at least two points, found 1", "copy"),
    (_points([1, 1], [1, 2]), "(1, 1) and (1, 2) do not ascend", "copy"),
    (_points([1, 2], [2, 1]), "(1, 2) and (2, 1) do not ascend", "copy"),
    (_points([1, 2], [2, 2]), "all sizes take the same time", "copy"),
    (_points([1.5, 2], [2, 3]), "expected a whole number, found a number", "copy[0][0]"),
    (_with(collectives=[COLLECTIVE | {"kind": "all_gathr"}]), "'all_gathr'; did you mean 'all_gather'", "collectives[0]"),
    (_with(collectives=[COLLECTIVE | {"size": 1}]), "at least 2, found 1", "collectives[0].size"),
    (_with(collectives=[COLLECTIVE] * 2), "there are two curves for ('all_reduce', 2, 4)", "collectives[1]"),
]


@pytest.mark.parametrize(("data", "what", "where"), BAD, ids=[f"{b[2]}-{b[1]}" for b in BAD])
def test_malformed_files_are_refused(data: Any, what: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileError) as caught:
        load(path)
    assert what in caught.value.what and where in str(caught.value.where) and str(path) in str(caught.value.where) and caught.value.remedy


@pytest.mark.parametrize("text", ["", TEXT[:-30], "{}", "\x00"])
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        Mesh({"tp": 2}, path)
    assert str(path) in str(caught.value.where) and caught.value.remedy


def test_measured_kinds_are_those_of_redistribution() -> None:
    assert set(KINDS) == set(redistribution.COLLECTIVES)


def test_an_architecture_is_saved_by_name_and_an_unknown_one_refused(tmp_path: Path) -> None:
    """A file without one has none: its kernels reach its rates, and its collectives take latency and bytes over bandwidth."""
    path = tmp_path / "h.json"
    save(dataclasses.replace(HARDWARE["h100"], name="mine"), path)
    assert load(path).architecture == "hopper"
    text = path.read_text()
    path.write_text(text.replace('"hopper"', '"hoper"'))
    with pytest.raises(FileError, match=r"unknown architecture 'hoper'.*hopper"):
        load(path)
    path.write_text(text.replace('"architecture": "hopper",\n', ""))
    assert load(path).reached is None
