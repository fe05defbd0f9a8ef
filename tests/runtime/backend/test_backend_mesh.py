"""The backend without the option ``mesh``: for which mesh a call is planned. And ``mode``: what Inductor is told."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fxshard
import fxshard.runtime.compile.compile as compiling
from fxshard.errors import OptionError, PlanError
from fxshard.plans.offload import Offload


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def alone() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="fxshard", options={"compiler": "eager", "cache": False, **options})


def planned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The meshes of the programs made since the last call, from the log."""
    found = [r.args[2] for r in caplog.records if str(r.msg).startswith("%s graph of %d nodes")]
    caplog.clear()
    return [str(mesh) for mesh in found]


def test_without_any_mesh_there_is_an_error_that_says_so() -> None:
    with pytest.raises(OptionError, match=r"no option 'mesh', no DTensor in the graph, no `with device_mesh:` .* no default process group"):
        compiled(lambda x: x * 2)(torch.ones(2))


def test_the_mesh_of_a_with_block_takes_precedence_over_the_default_group(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    """Each mesh has a program of its own, which later calls reuse; the option ``mesh`` takes precedence over both."""
    function, x = compiled(lambda x: x * 2), torch.ones(2)
    mesh, other = (init_device_mesh("cpu", (1, 1), mesh_dim_names=names) for names in (("dp", "tp"), ("a", "b")))
    with caplog.at_level(logging.INFO, "fxshard"):
        assert function(x).tolist() == [2, 2] and planned(caplog) == ["world=1"]
        with other, mesh:
            assert function(x).tolist() == [2, 2] and planned(caplog) == ["dp=1,tp=1"]
        with other:
            assert function(x).tolist() == [2, 2] and planned(caplog) == ["a=1,b=1"]
        for _ in range(2):
            function(x)
            with init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")):
                function(x)
        assert planned(caplog) == []
        with other:
            compiled(lambda x: x * 3, mesh=mesh)(x)
        assert planned(caplog) == ["dp=1,tp=1"]


def test_a_new_default_group_is_another_mesh(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    function = compiled(lambda x: x * 2)
    with caplog.at_level(logging.INFO, "fxshard"):
        function(torch.ones(2))
        dist.destroy_process_group()
        with pytest.raises(OptionError, match="no default process group"):
            function(torch.ones(2))
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        function(torch.ones(2))
        assert planned(caplog) == ["world=1", "world=1"]


def test_the_mesh_of_dtensors_is_used_and_two_meshes_are_refused(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("tp", "cp")]
    a, b = (distribute_tensor(torch.ones(2), mesh, [Replicate()]) for mesh in meshes)
    function = compiled(lambda a, b: (a * 2, b * 3))
    with caplog.at_level(logging.INFO, "fxshard"), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)):
        for _ in range(2):
            assert function(a, a)[1].device_mesh == meshes[0]
        assert function(b, b)[1].device_mesh == meshes[1]
        assert planned(caplog) == ["tp=1", "cp=1"]
        with pytest.raises(PlanError, match=r"^a is a DTensor on DeviceMesh.*tp=1.*, b is one on DeviceMesh.*cp=1"):
            function(a, b)


def test_a_mode_reaches_inductor_or_is_refused_by_name(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    config, original = torch._inductor.config, compiling.inductor_compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append((config.max_autotune, config.fallback_by_default))
        return original(*args, **kwargs)

    monkeypatch.setattr(compiling, "inductor_compile", noted)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for mode, told in (("default", (False, False)), ("max-autotune-no-cudagraphs", (True, False)), ("lite", (False, True))):
        torch._dynamo.reset()
        for function in (
            torch.compile(model, backend="fxshard", mode=mode),
            torch.compile(model, backend="fxshard", options={"mode": mode}),
        ):
            with torch.no_grad():
                torch.testing.assert_close(function(x), model(x))
        assert set(seen) == {told} and not config.max_autotune
        seen.clear()
    for mode, said in (("max-autotune", "replays CUDA graphs"), ("reduce-overhead", "replays CUDA graphs"), ("lit", "did you mean 'lite'")):
        torch._dynamo.reset()
        with pytest.raises(OptionError, match=said):
            torch.compile(model, backend="fxshard", mode=mode)(x)
    with pytest.raises(OptionError, match="mode 'lite' is Inductor's, the compiler is 'eager'"):
        compiled(model, mode="lite")(x)


def test_offload_is_refused_and_so_is_a_plan_with_it(alone: None) -> None:
    """The backend does not own parameters or the optimiser."""
    model, x, mesh = torch.nn.Linear(4, 4), torch.ones(2, 4), fxshard.Mesh({"dp": 1})
    with pytest.raises(OptionError, match="takes no 'offload': the caller has made the parameters"):
        torch.compile(model, backend="fxshard", options={"mesh": mesh, "offload": "optimizer"})(x)
    plan = fxshard.plan(model, (x,), mesh)
    node = next(end.node for end in plan.inputs if end.kind == "parameter")
    held = dataclasses.replace(plan, offloaded=(Offload(node, "parameters", 64, 64, 64, 1.0),))
    with pytest.raises(OptionError, match="the plan holds 1 parameter, or their optimiser's state, on the host"):
        torch.compile(model, backend="fxshard", options={"mesh": mesh, "plan": held})(x)


def test_an_unknown_keyword_is_refused(alone: None) -> None:
    def backend(module: Any, inputs: list[Tensor]) -> Any:
        return fxshard.runtime.backend.backend.fxshard(module, inputs, level=3)

    with pytest.raises(OptionError, match="takes no 'level'"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
