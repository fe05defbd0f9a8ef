"""The backend of torch.compile in one process, on a mesh of one rank: names, options, outputs, plans, errors as they are."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ConstraintError, FileError, OptionError, PlanError, RunError, TraceError
from fxshard.runtime.dynamo_graph import trace_graph, user_name

ONE = fxshard.Mesh({"dp": 1})


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def sharded(model: Any, dynamic: bool | None = None, **others: Any) -> Any:
    return torch.compile(model, backend="fxshard", dynamic=dynamic, options={"mesh": ONE, "compiler": "eager", **others})


def test_the_backend_is_found_by_name() -> None:
    assert "fxshard" in torch._dynamo.list_backends()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("L['self']._modules['layers']._modules['0']._buffers['mean']", "layers.0.mean"),
        ("L['self'].table", "table"),
        ("L['model']._parameters['w']", "w"),
        ("L['x']", "x"),
        ("L['self']", "self"),
        ("L['batch']['x']", "batch['x']"),
        ("G['state'].x", "state.x"),
        ("___elsewhere", "___elsewhere"),
    ],
)
def test_names_are_the_users(source: str, name: str) -> None:
    assert user_name(source) == name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": ONE, "memory_limits": 3}, "did you mean 'memory_limit'"),
        ({}, "needs the option 'mesh'"),
        ({"mesh": fxshard.Mesh({"dp": 2})}, "init_device_mesh"),
        ({"mesh": 2}, "is an int, not a DeviceMesh"),
        ({"mesh": ONE, "compiler": "inducter"}, "did you mean 'inductor'"),
        ({"mesh": ONE, "objective": "speed"}, "use one of time, communication"),
        ({"mesh": ONE, "timeout": "long"}, "'timeout' is 'long'"),
        ({"mesh": ONE, "pins": [("a", "R")]}, "pins={"),
        ({"mesh": ONE, "plan": 3}, "'plan' is an int"),
        ({"mesh": ONE, "hardware": "h10"}, "did you mean 'h100'"),
    ],
)
def test_bad_options_are_refused_with_a_remedy_and_not_wrapped(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        torch.compile(nn.Linear(2, 2), backend="fxshard", options=options)(torch.ones(1, 2))
    assert said in str(caught.value) and caught.value.remedy


def test_a_plan_for_another_mesh_is_refused() -> None:
    plan = fxshard.plan(nn.Linear(2, 2), (torch.ones(1, 2),), fxshard.Mesh({"dp": 2}))
    with pytest.raises(PlanError, match="dp=2"):
        sharded(nn.Linear(2, 2), plan=plan)(torch.ones(1, 2))


def test_inductor_and_eager_train_like_one_device() -> None:
    for compiler in ("inductor", "eager"):
        model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
        reference = copy.deepcopy(model)
        sharded(model, compiler=compiler)(x).pow(2).sum().backward()
        reference(x).pow(2).sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert not isinstance(p.grad, torch.distributed.tensor.DTensor)
            torch.testing.assert_close(p.grad, q.grad)


def views(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.view(-1), x.t(), y[0]


def test_outputs_that_share_memory_have_gradients_of_their_own() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    for outputs in (sharded(views)(x), views(z)):
        sum((k + 1) * out.pow(2).sum() for k, out in enumerate(outputs)).backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_outputs_with_other_strides_go_back_into_views() -> None:
    linear, x = nn.Linear(4, 8), torch.randn(2, 3, 4, requires_grad=True)
    heads = lambda x: linear(x).view(2, 3, 2, 4).transpose(1, 2)  # noqa: E731
    out, want = sharded(heads)(x), heads(x)
    torch.testing.assert_close(out, want)
    have, known = (torch.autograd.grad(value.pow(2).sum(), x)[0] for value in (out, want))
    torch.testing.assert_close(have, known)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        self.count += 1
        total += x.sum(0)
        return total


def test_what_is_changed_in_place_stays_the_same_tensor() -> None:
    model, total = Counter(), torch.zeros(3)
    count, compiled = model.count, sharded(model)
    for _ in range(2):
        assert compiled(torch.ones(2, 3), total) is total
    assert model.count is count and float(count) == 2 and total.tolist() == [4.0] * 3


def test_an_activation_changed_in_place_across_a_break_is_refused() -> None:
    with pytest.raises(TraceError, match="x is changed in place and needs a gradient"):
        sharded(lambda x: x.mul_(2).sin())(torch.ones(3, requires_grad=True) * 1)


def scaled(x: Tensor, factor: float, times: int) -> tuple[Tensor, int]:
    return x * factor * times, x.shape[0] * times


def test_sizes_and_numbers_that_change_are_planned_again(caplog: pytest.LogCaptureFixture) -> None:
    compiled = sharded(scaled)
    calls = [(3, 2.0, 1), (4, 2.0, 1), (4, 3.5, 1), (5, 3.5, 2), (5, 0.5, 3), *((n, 1.5, 2) for n in range(6, 16))]
    with caplog.at_level(logging.INFO, "fxshard"):
        for rows, factor, times in calls:
            out, size = compiled(torch.ones(rows), factor, times)
            assert size == rows * times and out.tolist() == [factor * times] * rows
    assert "planning again for inference: x (7,)" in caplog.text
    assert "was planned for 8 sets of sizes and numbers" in caplog.text


def test_dropout_follows_the_seed() -> None:
    compiled, x = sharded(nn.Dropout(0.5)), torch.ones(64)
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        masks.append(compiled(x).tolist())
    assert masks[0] == masks[2] != masks[1]


def test_autocast_around_the_call_is_kept() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    compiled = sharded(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have, want = compiled(x), model(x)
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-2)
    assert compiled(x).dtype == torch.float32


def test_a_plan_made_without_the_backend_fits_and_another_one_is_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(3, 4)
    fxshard.plan(model, (x,), ONE).save(tmp_path / "plan.json")
    torch.testing.assert_close(sharded(copy.deepcopy(model), plan=tmp_path / "plan.json")(x), model(x))
    with pytest.raises(PlanError, match="another graph"):
        sharded(nn.Sequential(nn.Linear(4, 8)), plan=str(tmp_path / "plan.json"))(x)


def test_a_dump_to_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        sharded(nn.Linear(4, 2), dump=tmp_path / "file")(torch.ones(3, 4))


def test_dump_has_a_folder_for_each_graph(tmp_path: Path) -> None:
    compiled = sharded(nn.Linear(4, 2), dump=tmp_path, dynamic=False)
    for rows in (3, 5):
        compiled(torch.ones(rows, 4))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert {"traced.txt", "06_lower.txt", "14_compile.txt"} <= {file.name for file in folder.iterdir()}


def test_weights_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(RunError, match="weight has no memory"):
        sharded(model)(torch.empty(3, 4, device="meta"))


def test_devices_that_a_graph_names_are_the_cpus_while_planning() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.cuda(non_blocking=True).to("cuda:1").to(torch.device("cuda", 0)) + 1)
    planned = trace_graph(graph, [torch.ones(2)], ["x"], ["input"])
    assert {n.meta["val"].device.type for n in planned.nodes if n.op != "output"} == {"cpu"}


def test_constraints_on_what_modules_return() -> None:
    """A name of a module means something in Dynamo's graph; one that means nothing, and a pin that cannot be, are errors."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    constraints = [fxshard.Pin("1", "R"), fxshard.Equal("0", "2"), fxshard.Forbid("0", "S(1)"), fxshard.Communication("dp", at_most=0)]
    torch.testing.assert_close(sharded(model, constraints=constraints)(x), model(x))
    for bad, said in (
        (fxshard.Pin("3", "R"), "'3' matches no parameter, buffer, input, output, module or node"),
        (fxshard.Pin("0.weight", "S(0)"), r"Pin\('0.weight', 'S\(0\)'\) asks for parameter 0.weight"),
        (fxshard.Equal("0", "4"), "'4' matches no"),
    ):
        with pytest.raises(ConstraintError, match=said):
            sharded(model, constraints=[bad])(x)
    with pytest.raises(OptionError, match="constraints are given as a Pin, not as a list"):
        sharded(model, constraints=constraints[0])(x)
