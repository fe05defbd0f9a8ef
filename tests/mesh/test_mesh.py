"""Meshes against row-major arrays and torch's DeviceMesh; links; errors that name the closest match."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard.errors import FxshardError, LayoutError, OptionError
from fxshard.mesh.hardware import HARDWARE, Link
from fxshard.mesh.hardware_file import find_hardware
from fxshard.mesh.mesh import Mesh, as_mesh, parse_mesh, preset_of_device


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 2, 3)])
def test_ranks_coordinates_and_groups_are_those_of_a_row_major_array(shape: tuple[int, ...]) -> None:
    mesh = Mesh({f"a{i}": n for i, n in enumerate(shape)})
    ranks = torch.arange(mesh.size).reshape(shape)
    for rank, coordinate in enumerate(mesh.coordinates()):
        assert ranks[coordinate] == rank == mesh.rank(coordinate)
        assert mesh.coordinate(rank) == coordinate
        for axis in range(mesh.ndim):
            index = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
            assert mesh.group(axis, coordinate) == tuple(ranks[index].tolist())


def test_links_by_the_span_of_an_axis() -> None:
    """On nodes of 8 ranks, ranks along tp=4 are adjacent; those along dp are 4 or 8 apart."""
    inside, between = HARDWARE["h100"].inside, HARDWARE["h100"].between
    assert [Mesh({"dp": 2, "tp": 4}, "h100").link(a) for a in (0, 1)] == [inside, inside]
    assert [Mesh({"dp": 4, "tp": 4}, "h100").link(a) for a in (0, 1)] == [between, inside]
    assert [Mesh({"pp": 2, "dp": 2, "tp": 8}, "h100").link(a) for a in (0, 1, 2)] == [between, between, inside]
    assert Mesh({"tp": 16}, "h100").link(0) == between


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 12))
def test_spans_against_counting_ranks(shape: list[int], node: int) -> None:
    """Counts for every group of an axis how many of its ranks are in each node."""
    mesh = Mesh({f"a{i}": n for i, n in enumerate(shape)}, replace(HARDWARE["h100"], node_size=node))
    for axis, n in enumerate(shape):
        held = {count for c in mesh.coordinates() for count in Counter(rank // node for rank in mesh.group(axis, c)).values()}
        span = mesh.span(axis)
        assert span.size == n and span.stride == math.prod(shape[axis + 1 :])
        assert span.is_inside == (held == {n})
        assert span.per_node == (held.pop() if len(held) == 1 else None)


def test_an_axis_across_nodes_needs_a_known_link() -> None:
    one = replace(HARDWARE["h100"], name="one node", between=None)
    assert Mesh({"dp": 2, "tp": 4}, one).link(0) == one.inside
    with pytest.raises(OptionError, match=r"axis 'dp' joins nodes, and the hardware 'one node' does not know[\s\S]*calibrate on two nodes"):
        Mesh({"dp": 2, "tp": 8}, one)
    assert Mesh({"dp": 2, "tp": 8}, one, links={"dp": Link(1e9, 5.0)}).link(0) == Link(1e9, 5.0)
    with pytest.raises(LayoutError, match="no axis 'tq'"):
        Mesh({"dp": 2, "tp": 4}, one, links={"tq": Link(1e9, 5.0)})


def test_presets() -> None:
    assert set(HARDWARE) == {"h100", "h200", "a100", "b200", "cpu"}
    assert HARDWARE["h100"].flops[2] == 989e12 and HARDWARE["a100"].flops[2] == 312e12
    assert HARDWARE["h200"].memory_bandwidth == 4.8e12
    for h in HARDWARE.values():
        assert h.inside.bandwidth >= h.between.bandwidth and h.inside.latency <= h.between.latency
        assert find_hardware(h) is find_hardware(h.name) is h


def test_the_preset_is_found_in_the_name_of_the_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, preset in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GB200", "b200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert preset_of_device("cuda") == preset
    assert preset_of_device("cpu") == "cpu" and not caplog.text


def test_an_unknown_gpu_has_a_gpus_prices_and_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    assert preset_of_device("cuda") == preset_of_device("cuda") == "a100"
    assert [r.message for r in caplog.records] == [
        "no preset is known for the GPU NVIDIA L40S: plans use the prices of a100; "
        "to do: pass hardware=, a preset or a file of 'fxshard calibrate'"
    ]


def test_text_and_equality() -> None:
    mesh = parse_mesh("dp=2, tp=4", "h100")
    assert mesh == Mesh({"dp": 2, "tp": 4}, "h100") and hash(mesh) == hash(Mesh({"dp": 2, "tp": 4}, "h100"))
    assert mesh != Mesh({"tp": 4, "dp": 2}, "h100") and mesh != Mesh({"dp": 2, "tp": 4}, "a100")
    assert str(mesh) == "dp=2,tp=4" and mesh.size == 8


def test_a_device_mesh_keeps_its_axis_names() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert as_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))) == Mesh({"dp": 1, "tp": 1}, "cpu")
        assert as_mesh(DeviceMesh("cpu", [[0]])) == Mesh({"axis0": 1, "axis1": 1}, "cpu")
        assert as_mesh(DeviceMesh("cpu", [0]), "h100").hardware.name == "h100"
    finally:
        dist.destroy_process_group()
    assert as_mesh(Mesh({"a": 2}), "h200") == Mesh({"a": 2}, "h200")


def test_an_unknown_axis_names_the_closest() -> None:
    with pytest.raises(LayoutError) as error:
        Mesh({"data": 2, "tensor": 4}).axis("tensr")
    assert error.value.what == "the mesh has no axis 'tensr'; did you mean 'tensor'?"
    assert error.value.remedy == "its axes are data, tensor"


@pytest.mark.parametrize("axes", [{}, {"a": 0}, {"a": -1}, {"a": True}, {"a": 2.0}, {"a b": 2}, {"": 2}, {3: 2}])
def test_bad_axes(axes: dict) -> None:
    with pytest.raises(OptionError) as error:
        Mesh(axes)
    assert error.value.remedy


@pytest.mark.parametrize("text", ["", "dp", "dp=x", "dp=2,", "dp=2,dp=2", "dp=0", "dp=-2", "2=dp", "dp=²", "dp=" + "9" * 5000])
def test_bad_mesh_texts(text: str) -> None:
    with pytest.raises(FxshardError) as error:
        parse_mesh(text)
    assert error.value.remedy


def test_an_axis_that_occurs_twice_is_named() -> None:
    with pytest.raises(OptionError, match=r"the axis 'tp' occurs twice in mesh 'tp=2, tp=4'[\s\S]*a name of its own"):
        parse_mesh("tp=2, tp=4")


def test_a_value_that_is_not_a_mesh_is_refused() -> None:
    with pytest.raises(OptionError, match=r"got tuple[\s\S]*fxshard.Mesh"):
        as_mesh((2, 2))  # type: ignore[arg-type]  # the wrong type is what is tested


def test_axes_must_be_a_mapping() -> None:
    with pytest.raises(OptionError, match="the axes of a mesh are a list") as error:
        Mesh([("a", 2)])  # type: ignore[arg-type]  # the wrong type is what is tested
    assert error.value.remedy
