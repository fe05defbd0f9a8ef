"""Pins on the inputs of submodules: how the nodes inside read them, and nobody else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ConstraintError, LayoutError, PlanError
from fxshard.graph.planning_graph import operands
from fxshard.plans.sharding_plan import ShardingPlan

MESH = fxshard.Mesh({"tp": 2})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale)
        return x


def arguments() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(4, 6, 8, dtype=torch.float64, generator=draw), torch.rand(8, dtype=torch.float64, generator=draw)


def planned(pins: dict[str, Any], layers: int = 2, **options: Any) -> tuple[Net, ShardingPlan]:
    torch.manual_seed(0)
    model = Net(layers).double()
    return model, fxshard.plan(model, arguments(), MESH, pins=pins, cache=False, **options)


def readings(plan: ShardingPlan, module: str, value: object) -> set[str]:
    """The layouts in which the nodes of a module's forward read a value."""
    assert plan.origin is not None
    found = set()
    for node in plan.origin.annotated.graph.nodes:  # type: ignore[attr-defined]
        inside = any(path.endswith(f".{module}") for path, _ in node.meta.get("nn_module_stack", {}).values())
        found |= {str(plan.specs[node.name].inputs[k]) for k, o in enumerate(operands(node)) if inside and o.name == value}
    return found


def result(plan: ShardingPlan, module: str) -> object:
    """The node that a module returns."""
    (((node,),),) = (plan.origin.annotated.graph.returned[module],)  # type: ignore[union-attr]
    return node


@pytest.mark.parametrize("layers", [2, 6])
def test_the_module_reads_its_input_in_the_pinned_layout(layers: int) -> None:
    whole = {"input_layouts": "R", "output_layouts": "R"}
    model, free = planned({}, layers, **whole)
    _, plan = planned({"layers.*.mlp.inputs": "S(1)"}, layers, **whole)
    for i in range(layers):
        assert readings(plan, f"layers.{i}.mlp", result(plan, f"layers.{i}.norm")) == {"S(1)"}
    assert plan.objective >= free.objective
    torch.testing.assert_close(fxshard.simulate(model, arguments(), plan).outputs, model(*arguments()).detach(), rtol=1e-9, atol=1e-9)


def test_other_readers_are_free() -> None:
    """The norm must read x by rows; the product beside it reads x by columns, as its result is pinned."""
    pins = {"layers.0.norm.inputs": "S(0)", "layers.0.mlp.inputs": "S(0)", "args[0]": "S(2)", "layers.0": "S(2)"}
    _, plan = planned(pins, 1)
    assert readings(plan, "layers.0.norm", "args_0") == {"S(0)"}
    assert "S(2)" in readings(plan, "layers.0", "args_0")


def test_several_inputs_are_counted_in_the_order_of_reading() -> None:
    _, plan = planned({"layers.0.inputs[0]": "S(0)", "layers.1.inputs": ("S(1)", None)})
    assert readings(plan, "layers.0", "args_0") == {"S(0)"}
    assert readings(plan, "layers.1", result(plan, "layers.0")) == {"S(1)"}
    _, plan = planned({}, constraints=[fxshard.Forbid("layers.*.mlp.inputs", layout) for layout in ("R", "S(2)")])
    assert readings(plan, "layers.0.mlp", result(plan, "layers.0.norm")) <= {"S(0)", "S(1)"}


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("layers.0.mlp.inputs[3]", "layers.0.mlp.inputs has 1 input", "name layers.0.mlp.inputs"),
        ("layers.0.inputs[2]", "layers.0.inputs has 2 inputs", "name one of layers.0.inputs[0], layers.0.inputs[1]"),
        ("layers.0.mlp[4]", "the call of layers.0.mlp has 1 result", "name layers.0.mlp"),
        ("layers.0.mpl.inputs", "no module whose inputs are read; did you mean 'layers.0.mlp.inputs'?", "name one of layers.0.inputs"),
        ("layers.*.mpl.inputs[0]", "did you mean 'layers.*.mlp.inputs'?", "name one of layers.*.inputs[0], layers.*.norm.inputs[0]"),
        ("layers.0.mlp.input", "did you mean 'layers.0.mlp.inputs'?", "name one of layers.0.inputs"),
        ("layers.0.mpl", "did you mean 'layers.0.mlp'?", "name one of layers.0.norm.weight"),
    ],
)
def test_a_wrong_name_is_told_from_a_wrong_index(name: str, message: str, remedy: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(message)) as error:
        planned({name: "R"})
    assert error.value.remedy is not None and error.value.remedy.startswith(remedy)


def test_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers.0.inputs has 2 inputs, pins\['layers.0.inputs'\] gives 1 layout"):
        planned({"layers.0.inputs": "R"})
    with pytest.raises(ConstraintError, match=r"'layers.9.inputs' matches no module"):
        planned({"layers.9.inputs": "R"})
    with pytest.raises(ConstraintError, match=r"cannot hold together: (.|\n)*pins\['layers.0.norm.inputs'\]='S\(0\)'"):
        planned({"layers.0.norm.inputs": "S(0)", "layers.0.norm": "S(2)"})
    with pytest.raises(ConstraintError, match=r"layers.0.mlp.inputs has no layout of its own"):
        planned({}, constraints=[fxshard.Equal("layers.0.mlp.inputs", "args[0]")])
    _, plan = planned({})
    with pytest.raises(PlanError, match=r"'layers.0.mlp.inputs' has no layout of its own"):
        plan.explain("layers.0.mlp.inputs")
