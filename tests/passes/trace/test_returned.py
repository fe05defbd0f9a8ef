"""Results of modules: the values that a graph records under a module's name are those that a forward hook sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from zoo import bert, vit

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.backend.dynamo_graph import read_graph, specialised, trace_graph


class Several(nn.Module):
    """Returns its input, tensors in containers (one of them a view), and a number."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:
        return x, {"a": x.T, "b": [x * scale, None]}, 3


class Whole(nn.Module):
    """Has modules that are called twice, held twice, in place, in a checkpoint, containers, or not called."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.linear, self.inplace = nn.Identity(), nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.several, self.norm, self.kept = Several(), nn.LayerNorm(8), nn.Linear(8, 8)
        self.stack = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.GELU())
        self.unused = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(2.0))
        self.again = self.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inplace(self.linear(self.same(x)))
        z, rest, factor = self.several(self.again(y), scale=self.scale)
        z = checkpoint(self.kept, self.norm(z + rest["a"].T * factor + rest["b"][0]), use_reentrant=False)
        return self.stack(z.add_(1)).softmax(-1)


def seen_by_hooks(model: nn.Module, args: Any, kwargs: Any) -> dict[str, list[list[torch.Tensor]]]:
    """By the first name of each module, for each of its calls: copies of the distinct tensors that it returned."""
    found: dict[str, list[list[torch.Tensor]]] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            leaves = {id(t): t.detach().clone() for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)}
            found.setdefault(name, []).append(list(leaves.values()))

        return note

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model(*args, **kwargs)
    for one in hooks:
        one.remove()
    return found


class Values(fx.Interpreter):
    """Keeps the value of each node in ``found``."""

    def run_node(self, n: fx.Node) -> Any:
        self.found = getattr(self, "found", {})
        self.found[n.name] = super().run_node(n)
        return self.found[n.name]


def computed(graph: PlanningGraph, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The value of each node. Tangents are ones."""
    paths = pytree.tree_flatten_with_path((args, kwargs))[0]
    given = {("args" if path[0].idx == 0 else "kwargs") + pytree.keystr(path[1:]): leaf for path, leaf in paths}
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **given, **kwargs}
    interpreter = Values(graph.module)
    fakes = [graph.by_name[i.node].meta["val"] for i in graph.inputs]
    ones = [torch.ones(fake.shape, dtype=fake.dtype) for fake in fakes]
    with torch.no_grad():
        interpreter.run(*(held.get(i.name, one) for i, one in zip(graph.inputs, ones, strict=True)), enable_io_processing=False)
    return interpreter.found


@pytest.mark.parametrize(("case", "train"), [("whole", False), ("whole", True), ("bert", True), ("vit", False)])
def test_values_are_those_that_hooks_see(case: str, train: bool) -> None:
    model, args, kwargs = (Whole(), (torch.randn(8, 8),), {}) if case == "whole" else {"bert": bert, "vit": vit}[case]()
    model.eval()
    graph = trace(model, args, kwargs, train=train)
    values, seen = computed(graph, model, args, kwargs), seen_by_hooks(model, args, kwargs)
    first = {name for name, _ in model.named_modules()}
    assert set(seen) == {name for name in graph.returned if name in first}
    for name, calls in seen.items():
        assert len(graph.returned[name]) == len(calls)
        for nodes, tensors in zip(graph.returned[name], calls, strict=True):
            for node, tensor in zip(nodes, tensors, strict=True):
                torch.testing.assert_close(values[node], tensor, msg=f"{name}: {node}")


def test_names_of_modules() -> None:
    """A module held twice has both names, one that is not called has none, and a returned input is that input."""
    graph = trace(Whole(), (torch.randn(8, 8),))
    assert graph.returned["again"] == graph.returned["linear"]
    assert "unused" not in graph.returned
    assert graph.returned["same"] == ((graph.inputs_of("input")[0].node,),)
    assert graph.returned["stack"] == graph.returned["stack.2"] and graph.returned["stack.0"] == graph.returned["stack.1"]


def test_recording_results_does_not_change_the_graph() -> None:
    """A result that nothing reads is not computed."""

    class Dead(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.relu(), x.exp().sum()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Dead()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    graph = trace(Outer(), (torch.ones(2, 3),), train=False)
    assert [n.op for n in graph.nodes] == ["placeholder", "call_function", "output"]
    assert graph.returned == {"inner": (("relu", None),)}


class Plain(Whole):
    """Reads all results of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.Bilinear(8, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.several(self.inplace(self.linear(x)), self.again(self.norm(x))))


def test_a_graph_of_torch_compile() -> None:
    """There, the results of a module are the values computed in its call and read outside, so a module that returns its input has none.

    A module that is held twice has the name by which it is called.
    """
    model, args = Plain(), (torch.randn(8, 8),)
    found: list[PlanningGraph] = []

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        graph = read_graph(module, examples)
        copy, tensors, _ = specialised(graph, examples)
        found.append(trace_graph(copy, tensors, graph.names, graph.kinds))
        return module

    torch.compile(model, backend=backend)(*args)
    (graph,) = found
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = computed(graph, model, args, {"x": args[0]} | named)
    seen = seen_by_hooks(model, args, {})
    seen["again"] = [seen["linear"].pop()]
    assert set(graph.returned) == set(seen) - {"stack.1"}
    for name, calls in graph.returned.items():
        for nodes, tensors in zip(calls, seen[name], strict=True):
            torch.testing.assert_close([values[node] for node in nodes], tensors, msg=f"{name}: {nodes}")
