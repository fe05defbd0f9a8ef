"""Users' Triton kernels run on whole tensors, are listed, and give the results of one device; a ``triton_op`` can have a rule."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _triton

import fxshard
from fxshard._torch_compat.dynamo.kernels import kernels_captured
from fxshard.errors import FileError, TraceError
from fxshard.mesh.mesh import Mesh
from fxshard.ops.user_kernel import KernelCall, keep_call
from fxshard.passes.trace.rewrites.triton_kernels import replace_kernel_calls
from fxshard.passes.trace.trace import trace
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.passes.tracing import SQUARE, TWO, Function, real, simulated
from tests.user_kernels import KERNEL, Net, launched, told_what_it_writes

PAIR = Mesh({"a": 2})
OP = "fxshard_users.triton_kernel.default"


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    told_what_it_writes(monkeypatch)


def made() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Net().double(), (real(5, 6, grad=False),)


@pytest.mark.parametrize("train", [True, False])
def test_results_equal_one_device(train: bool) -> None:
    model, args = made()
    graph, reference = trace(model, args, train=train), one_device(model, args, train=train)
    for mesh in (TWO, SQUARE):
        for plan in range(3):
            KERNEL.seen.clear()
            assert_equal_to_one_device(simulated(graph, mesh, model, args, plan=plan), reference)
            assert KERNEL.seen == [((5, 4), (3, 1, 1))] * mesh.size * (6 if train else 2)


def test_a_call_is_one_replicated_node() -> None:
    model, args = made()
    plan = fxshard.plan(model, args, PAIR, input_layouts="S(0)", output_layouts="S(0)")
    nodes = [node for node in plan.nodes if node.op == OP]
    assert [n.name for n in nodes] == ["scale_kernel", *(f"scale_kernel_{k}" for k in range(1, 6))]
    assert {str(n.spec) for n in nodes} == {"R, R, R -> R"}
    assert {name for name, _ in plan.fallbacks} == {n.name for n in nodes}
    assert all("a Triton kernel holds the sizes of whole tensors" in reason for _, reason in plan.fallbacks)


def test_the_text_of_a_call_does_not_depend_on_the_process() -> None:
    """Ranks compare graphs, so the text must not contain indexes of torch's tables."""
    model, args = made()
    first, second = trace(model, args), trace(model, args)
    assert first.hash == second.hash
    (call, *_) = (n.args[1] for n in first.nodes if str(n.target) == OP)
    tensors = "x=[4, 1], y=[4, 1], out=[4, 1] written"
    assert call == f"tests.user_kernels.scale_kernel(n=20, factor=2.0, BLOCK=8, {tensors}) on ((3, 1, 1))"


def test_different_calls_have_different_texts() -> None:
    """A function given to a kernel appears by its name. The second of two objects with equal texts gets a number."""

    def call(plain: object) -> KernelCall:
        return KernelCall(test_different_calls_have_different_texts, ((1,),), {}, {"ACT": plain}, {"x": (1,)}, ("x",))

    given = [torch.relu, made, call, object(), object()]
    names = [keep_call(call(one)) for one in given]
    assert len(set(names)) == len(given) and names == [keep_call(call(one)) for one in given]
    assert f"ACT={__name__}.made" in names[1] and names[4] == f"{names[3]} #2"


def test_a_buffer_that_a_kernel_changes() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Buffer(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            self.total.copy_(launched(self.total, x, 3.0))
            return self.total + x

    model, args = Filled().double(), (real(6, grad=False),)
    result = simulated(trace(model, args, train=False), TWO, model, args)
    assert_equal_to_one_device(result, one_device(model, args, train=False))


@pytest.fixture
def scaled() -> Iterator[Any]:
    with torch.library._scoped_library("fxshard_tests", "FRAGMENT"):

        @torch.library.triton_op("fxshard_tests::scaled", mutates_args=())
        def scaled(x: Tensor, y: Tensor) -> Tensor:
            return launched(x, y, 2.0)

        yield scaled


@pytest.mark.usefixtures("own_rules")
def test_a_triton_op_is_one_operator_that_can_have_a_rule(scaled: Any) -> None:
    """Its grid follows from the sizes of the shards: five rows on two ranks."""
    model, args = Function(lambda self, x: scaled(x.sin(), x).cos()).double(), (real(5, 4, grad=False),)
    asked = {"train": False, "input_layouts": "S(0)", "output_layouts": "S(0)"}
    plan = fxshard.plan(model, args, PAIR, **asked)
    assert [reason for _, reason in plan.fallbacks] == ["no rule for fxshard_tests.scaled.default"]
    fxshard.register_rule("fxshard_tests::scaled", "a b, a b -> a b")
    plan = fxshard.plan(model, args, PAIR, **asked)
    assert plan.fallbacks == () and plan.collectives == ()
    KERNEL.seen.clear()
    torch.testing.assert_close(fxshard.simulate(model, args, plan).outputs, model(*args))
    assert KERNEL.seen[:2] == [((3, 4), (2, 1, 1)), ((2, 4), (1, 1, 1))]


def test_kernels_are_captured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: during a trace torch believes that Triton is usable, and finds a target."""
    names = ("triton", "triton.backends", "triton.backends.compiler", "triton.runtime")
    package = {name: ModuleType(name) for name in names}
    package["triton.backends.compiler"].GPUTarget = lambda *target: target  # type: ignore[attr-defined]  # a module made here
    driver = package["triton.runtime"].driver = SimpleNamespace(_active=None)  # type: ignore[attr-defined]  # likewise
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_triton, "has_triton_package", lambda: True)
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    with kernels_captured(), kernels_captured():
        assert _triton.has_triton() and driver._active.get_current_target()[0] == "cuda"
    assert not _triton.has_triton() and driver._active is None


def test_a_program_with_a_kernel_cannot_be_saved(tmp_path: Path) -> None:
    model, args = made()
    with pytest.raises(FileError, match=r"fxshard_users.triton_kernel.default. cannot be stored"):
        fxshard.export(model, args, PAIR).save(tmp_path / "program.pt2")


def test_a_call_that_was_not_made_functional() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "tma_descriptor_metadata": {}, "kwargs": {"x": x}}
    graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), given)
    graph.output(x)
    with pytest.raises(TraceError, match=r"known only at run time(.|\n)*custom_op"):
        replace_kernel_calls(fx.GraphModule(nn.Module(), graph))
