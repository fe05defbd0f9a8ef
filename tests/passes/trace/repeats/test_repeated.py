"""Equal layers are traced as four. The graph equals, node by node, the one that tracing each layer gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.llama import Llama
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision
from fxshard.passes.trace.trace import trace
from fxshard.shapes import DynamicDim
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.passes.tracing import SQUARE, real, simulated

LAYERS = 7
TOKENS = torch.zeros(2, 16, dtype=torch.int64)
STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class Block(nn.Module):
    """``index`` is an attribute that the forward does not read."""

    def __init__(self, index: int = 0, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), second or nn.Linear(8, 8)
        self.norm, self.drop, self.index = nn.BatchNorm1d(8), nn.Dropout(0.1), index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.second(self.norm(self.first(x)))))


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + self.index)


class Holder:
    """An object that all layers read, and that the model changes between their calls."""

    number = 0
    numbers: tuple[int, ...] = ()


class Reading(Block):
    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * (1.0 + self.holder.number) + len(self.holder.numbers)


Run = Callable[["Stack", Tensor], Any]


class Stack(nn.Module):
    """Blocks in a row, or called by ``run``."""

    def __init__(self, blocks: Sequence[nn.Module], run: Run | None = None) -> None:
        super().__init__()
        self.inner, self.layers, self.outer = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 8)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        if self.run is not None:
            return self.run(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.outer(x)


@pytest.fixture(autouse=True)
def _log_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxshard")


def everything(graph: PlanningGraph) -> list[Any]:
    """All of a graph that is compared, including the modules of its nodes."""
    modules = [[[path for path, _ in (n.meta.get(stack) or {}).values()] for stack in STACKS] for n in graph.nodes]
    ends = graph.inputs, graph.outputs, graph.returned, graph.aliases, graph.unreduced
    family = graph.family
    of_all_sizes = [] if family is None else [n for n in family.module.graph.nodes if n.op != "output"]
    sizes = [str(family and family.guards), *(str((n.args, n.meta["val"])) for n in of_all_sizes)]
    return [graph.hash, ends, graph.lines, modules, [sorted(n.meta.get("custom") or {}) for n in graph.nodes], sizes]


def checked(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, **options: Any) -> PlanningGraph:
    """The graph, after a check that it equals the one that tracing each layer gives."""
    graph = trace(model, args, kwargs, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxshard.passes.trace.repeats.repeated.candidates", lambda model: {})
        whole = trace(model, args, kwargs, **options)
    for mine, truth in zip(everything(graph), everything(whole), strict=True):
        assert mine == truth
    return graph


def blocks(kind: type[Block] = Block) -> list[Block]:
    return [kind(index) for index in range(LAYERS)]


def traced_as_four(caplog: pytest.LogCaptureFixture) -> str:
    """The layers that the log says were traced as four."""
    return "".join(r.getMessage().partition("traced as four: ")[2] for r in caplog.records)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layers", [5, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (6, 9))])
def test_a_llama(layers: int, train: bool, caplog: pytest.LogCaptureFixture) -> None:
    checked(Llama.small(layers=layers).train(train), (TOKENS, TOKENS), train=train)
    assert traced_as_four(caplog) == f"layers.0 to layers.{layers - 1}"


def test_mixed_precision_casts_each_layers_parameters(caplog: pytest.LogCaptureFixture) -> None:
    checked(Llama.small(layers=5), (TOKENS, TOKENS), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert traced_as_four(caplog) == "layers.0 to layers.4"


def test_buffers_change_in_each_layer_and_each_draws_its_own_numbers(caplog: pytest.LogCaptureFixture) -> None:
    graph = checked(Stack(blocks()), (real(4, 8).float(),))
    draws = [n.args[3] for n in graph.nodes if n.target is torch.ops.fxshard.dropout.default]
    assert traced_as_four(caplog) == "layers.0 to layers.6"
    assert draws == list(range(LAYERS))
    assert sum(o.kind == "mutation" for o in graph.outputs) == 3 * LAYERS


@pytest.mark.parametrize("frozen", [2, LAYERS])
def test_frozen_layers_have_no_gradients(frozen: int) -> None:
    model = Stack(blocks())
    model.layers[:frozen].requires_grad_(False)
    checked(model, (real(4, 8).float(),))


def test_a_module_shared_by_all_layers_stays_shared(caplog: pytest.LogCaptureFixture) -> None:
    shared = nn.Linear(8, 8)
    checked(Stack([Block(second=shared) for _ in range(LAYERS)]), (real(4, 8).float(),))
    assert traced_as_four(caplog) == "layers.0 to layers.6"


def test_sharded_results_equal_one_device(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]).double()
    x = real(4, 8)
    result = simulated(trace(model, (x,)), SQUARE, model, (x,))
    assert traced_as_four(caplog) == "layers.0 to layers.6"
    assert_equal_to_one_device(result, one_device(model, (x,)))


def backwards(self: Stack, x: Tensor) -> Tensor:
    for layer in reversed(self.layers):
        x = layer(x)
    return x


def test_the_order_of_the_calls_counts(caplog: pytest.LogCaptureFixture) -> None:
    checked(Stack(blocks(), backwards), (real(4, 8).float(),))
    assert traced_as_four(caplog) == "layers.6 to layers.0"


# Layers that are not equal, or are not called in a row, are traced one by one.


def numbered(self: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(self.layers):
        x = layer(x) * (index + 1)
    return x


def all_kept(self: Stack, x: Tensor) -> list[Tensor]:
    kept = []
    for layer in self.layers:
        kept.append(x := layer(x))
    return kept


def partly_without_gradients(self: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(self.layers):
        with torch.set_grad_enabled(index >= 3):
            x = layer(x)
    return x


def regularised(self: Stack, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return x.sum() + sum(layer.first.weight.square().sum() for layer in self.layers)


def tied(self: Stack, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return F.linear(x, self.layers[3].first.weight)


def line_by_line(self: Stack, x: Tensor) -> Tensor:
    x = self.layers[0](x)
    x = self.layers[2](self.layers[1](x))
    x = self.layers[3](x)
    return self.layers[6](self.layers[5](self.layers[4](x)))


def checkpointed(self: Stack, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("run", [numbered, all_kept, partly_without_gradients, regularised, tied, line_by_line, checkpointed])
def test_code_between_or_beside_the_calls(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    checked(Stack(blocks(), run), (real(4, 8).float(),))
    assert not traced_as_four(caplog)


def other_probability(model: Stack) -> None:
    model.layers[3].drop.p = 0.5


def other_mode(model: Stack) -> None:
    model.layers[3].eval()


def hooked(model: Stack) -> None:
    model.layers[3].second.register_forward_hook(lambda module, args, output: output * 2)


def own_forward(model: Stack) -> None:
    model.layers[3].forward = lambda x: x * 3  # type: ignore[method-assign]


def shared_by_two(model: Stack) -> None:
    model.layers[4].second = model.layers[2].second


def tied_elsewhere(model: Stack) -> None:
    model.outer.weight = model.layers[3].first.weight


@pytest.mark.parametrize("change", [other_probability, other_mode, hooked, own_forward, shared_by_two, tied_elsewhere])
def test_one_layer_that_differs(change: Callable[[Stack], None], caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(blocks())
    change(model)
    checked(model, (real(4, 8).float(),))
    assert "layers.0 to layers.6" not in traced_as_four(caplog)


def counting(self: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(self.layers):
        self.layers[0].holder.number = index
        x = layer(x)
    return x


def growing(self: Stack, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
        self.layers[0].holder.numbers += (1,)
    return x


@pytest.mark.parametrize("run", [counting, growing])
def test_a_value_that_changes_between_the_calls_is_read_each_time(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    holder = Holder()
    checked(Stack([Reading(holder) for _ in range(LAYERS)], run), (real(4, 8).float(),))
    assert not traced_as_four(caplog)


class Sloped(Block):
    """Computes with a tensor that is no buffer. Dynamo's guards check the shape and dtype of such a tensor, not its values."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.slope = torch.tensor(float(index + 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.slope


@pytest.mark.parametrize("dynamic", [(), (DynamicDim("rows", (("args[0]", 0),), 4),)], ids=["one size", "any size"])
def test_layers_with_tensors_that_are_no_buffers_are_not_equal(dynamic: tuple[DynamicDim, ...], caplog: pytest.LogCaptureFixture) -> None:
    checked(Stack(blocks(Sloped)), (real(4, 8).float(),), dynamic=dynamic)
    assert not traced_as_four(caplog)
    assert "is no parameter or buffer of the model" in caplog.text


def test_layers_whose_forward_reads_the_index_are_not_equal(caplog: pytest.LogCaptureFixture) -> None:
    checked(Stack(blocks(Scaled)), (real(4, 8).float(),))
    assert not traced_as_four(caplog)
    assert "layers.1 is traced separately although it looks like other layers: attributes that the forward reads are others" in caplog.text
