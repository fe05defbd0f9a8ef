"""What ``parallelize_module`` refuses when it is called, before it changes the module. tests/distributed/module/test_styles.py runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.errors import OptionError, TraceError


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})


@pytest.mark.parametrize(
    ("plan", "options", "what"),
    [
        ({"up": "colwize"}, {}, r"'colwize' is not a style of a module's weights; did you mean 'colwise'"),
        ({"up": "colwize", "down": ColwiseParallel()}, {}, r"'up': 'colwize' is not a module's name and a ParallelStyle"),
        ({"tp": {"up": "colwize"}}, {}, r"did you mean 'colwise'"),
        ("colwize", {}, r"'colwize', given for 'tp', is not a word for an axis(.|\n)*\"layers\.\*\.up\": \"colwise\""),
        ("fdsp", {}, r"'fdsp', given for 'tp', is not a word for an axis; did you mean 'fsdp'"),
        (None, {"parallel": "fdsp"}, r"did you mean 'fsdp'"),
        (None, {"parallel": {"tp": "fdsp"}}, r"did you mean 'fsdp'"),
        (None, {"parallel": {"tpp": "fsdp"}}, r"the mesh has no axis 'tpp'; did you mean 'tp'"),
        (None, {"parallel": {"tp": {"up": "colwize"}}}, r"did you mean 'colwise'"),
        ({"up": ColwiseParallel()}, {"parallel": {"up": "colwize"}}, r"did you mean 'colwise'"),
        ({"tp": "fsdp"}, {"parallel": {"tp": "cp"}}, r"parallelize_plan and parallel= both give words for axes"),
        ({"up": ColwiseParallel()}, {"parallel": {"tp": "ddp"}}, r"parallelize_plan has styles for 'tp', and parallel= a word"),
    ],
)
def test_a_misspelt_word_is_refused_at_once(plan: Any, options: dict[str, Any], what: str, mesh: DeviceMesh) -> None:
    """The module stays as it is, and a call for it that waits for the first forward still does."""
    plain = model()
    with pytest.raises(OptionError, match=what):
        fxshard.parallelize_module(plain, mesh["tp"], plan, **options)
    assert "forward" not in vars(plain) and not any(hasattr(p, "placements") for p in plain.parameters())
    waits = fxshard.parallelize_module(plain, mesh["tp"], {"up": "colwise"})
    forward = vars(waits)["forward"]
    with pytest.raises(OptionError, match=what):
        fxshard.parallelize_module(waits, mesh["tp"], plan, **options)
    assert vars(waits)["forward"] is forward


@pytest.mark.parametrize(("plan", "options"), [("fsdp", {}), (None, {"parallel": "fsdp"}), ({"tp": "fsdp"}, {})])
def test_a_word_alone_is_for_a_mesh_of_one_axis(plan: Any, options: dict[str, Any], mesh: DeviceMesh) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    found = fxshard.parallelize_module(layers, mesh["tp"], plan, example_args=(torch.ones(4, 8),), compiler="eager", cache=False, **options)
    assert all(p.placements[0].is_shard(0) for p in found.parameters())
    with pytest.raises(OptionError, match="does not say for which axis, and the mesh has dp, tp"):
        fxshard.parallelize_module(model(), mesh, "fsdp")


def test_a_style_that_takes_a_whole_value_for_a_shard_is_refused_with_its_module(mesh: DeviceMesh) -> None:
    """torch would put the equal rows of both ranks one after the other."""
    styles = {"0": ColwiseParallel(output_layouts=Replicate()), "1": ColwiseParallel(input_layouts=Shard(0))}
    chain, options = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"example_args": (torch.ones(4, 8),), "compiler": "eager"}
    with pytest.raises(TraceError, match=r"takes a value that is equal on all ranks as this rank's shard(.|\n)*module 1\n"):
        fxshard.parallelize_module(chain, mesh["tp"], styles, **options)
