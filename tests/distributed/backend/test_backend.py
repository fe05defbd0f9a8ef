"""torch.compile(backend="fxshard") on two gloo ranks gives the numbers of one device, with plain parameters and with DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxshard
import fxshard.runtime.backend.backend as backend
from examples.llama import Llama
from fxshard.errors import ConstraintError, FxshardError, PlanError, RunError
from fxshard.runtime.calls.inputs import local_batch
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
ROUNDING = 32 * torch.finfo(torch.float32).eps


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def options(**others: Any) -> dict[str, Any]:
    return {"mesh": mesh_of_two(), "compiler": "eager", "timeout": 60.0, **others}


def sharded(model: nn.Module, dynamic: bool | None = None, **others: Any) -> Any:
    return torch.compile(model, backend="fxshard", dynamic=dynamic, options=options(**others))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(have: Tensor, want: Tensor, floor: float = 0.0) -> None:
    atol = max(TOLERANCE * float(want.detach().abs().max() or 1), floor)
    torch.testing.assert_close(whole(have.detach()), want.detach(), rtol=TOLERANCE, atol=atol)


def train_both(
    model: nn.Module, compiled: Any, reference: nn.Module, step: Callable[[Any], Tensor], same: Callable[[Any], Tensor] | None = None
) -> None:
    """Three steps of SGD each; losses, gradients, parameters and buffers agree. ``same`` is ``step`` on one device.

    Some gradients are zero up to rounding, such as that of a bias before a batch norm: their tolerance, and that of the parameters
    they update, is relative to the largest gradient.
    """
    ours, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        have, want = step(compiled), (same or step)(reference)
        close(have, want)
        for loss, optimizer in ((have, ours), (want, theirs)):
            optimizer.zero_grad()
            loss.backward()
        rounding = ROUNDING * max(float(q.grad.abs().max()) for q in reference.parameters() if q.grad is not None)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) and isinstance(p.grad, DTensor) == isinstance(p, DTensor)
            if q.grad is not None:
                assert p.grad.shape == q.grad.shape
                close(p.grad, q.grad, rounding)
        ours.step()
        theirs.step()
    for p, q in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        close(p, q, rounding)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Rich(nn.Module):
    """Keyword arguments, nested outputs, buffers, an argument that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0, seen: Tensor | None = None) -> dict[str, Any]:
        hidden = self.norm(self.linear(batch["x"])) * scale
        self.calls += 1
        if seen is not None:
            seen += batch["x"].detach().sum(0)
        return {"hidden": hidden, "pair": (hidden.sum(-1), batch["x"].shape[0]), "view": hidden.view(-1), "name": "rich"}


class Broken(nn.Module):
    """A graph break: the second graph gets an activation of the first, and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden), hidden.flatten()


def mlp_inductor() -> None:
    model, x = MLP(), torch.randn(8, 16)
    train_both(model, sharded(model, compiler="inductor"), copy.deepcopy(model), lambda m: m(x).pow(2).mean())


def llama_loss_inside() -> None:
    """The model computes the loss. test_backend_sizes.py tests it through Inductor, at several lengths."""
    model, tokens, targets = Llama.small(layers=1), torch.randint(0, 256, (4, 16)), torch.randint(0, 256, (4, 16))
    train_both(model, sharded(model), copy.deepcopy(model), lambda m: m(tokens, targets))


def llama_loss_outside() -> None:
    model, tokens, targets = Llama.small(layers=1), torch.randint(0, 256, (4, 16)), torch.randint(0, 256, (4, 16))
    train_both(model, sharded(model), copy.deepcopy(model), lambda m: F.cross_entropy(m(tokens).flatten(0, 1), targets.flatten()))


def work_is_shared() -> None:
    """The computation is sharded although parameters are replicated; a plan that the user made gives the same program."""
    made: list[Any] = []
    compile_program = backend.compile_program
    backend.compile_program = lambda bound, *how: made.append(bound.program) or compile_program(bound, *how)
    x = torch.randn(8, 16)
    pins = {"*.weight": "R", "*.bias": "R", "einsum": "S(0)"}
    plan = fxshard.plan(MLP(), (x,), mesh_of_two(), input_layouts="R", output_layouts="R", pins=pins)
    try:
        for others in ({"pins": {"einsum": "S(0)"}}, {"plan": plan}, {"constraints": [fxshard.Pin("einsum", "S(0)")]}):
            model = MLP()
            train_both(model, sharded(model, **others), copy.deepcopy(model), lambda m: m(x).pow(2).mean())
    finally:
        backend.compile_program = compile_program
    for program in made:
        assert {str(layout) for layout in program.input_layouts[:4]} == {"R"}
        assert str(program.plan.specs["einsum"].outputs[0]) == "S(0)" and program.collectives
    assert made[1].plan.hash == plan.hash


def rich_model() -> None:
    model, x = Rich(), torch.randn(8, 16)
    seen = [torch.zeros(16), torch.zeros(16)]

    def step(m: Any, mine: Tensor) -> Tensor:
        out = m({"x": x}, scale=0.5, seen=mine)
        assert out["name"] == "rich" and out["pair"][1] == 8 and not isinstance(out["hidden"], DTensor)
        return out["hidden"].pow(2).sum() + out["pair"][0].sum() + (out["view"] ** 3).sum()

    reference = copy.deepcopy(model)
    train_both(model, sharded(model), reference, lambda m: step(m, seen[0]), lambda m: step(m, seen[1]))
    close(seen[0], seen[1])
    assert float(model.calls) == 3 and int(model.norm.num_batches_tracked) == 3


def graph_break() -> None:
    model, x = Broken(), torch.randn(8, 16)

    def step(m: Any) -> Tensor:
        out, hidden = m(x)
        return out.pow(2).sum() + hidden.pow(2).sum()

    train_both(model, sharded(model, pins={"first.weight": "R"}), copy.deepcopy(model), step)


def evaluate_and_train_again() -> None:
    model, x = Rich(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    compiled = sharded(model)
    step = lambda m: m({"x": x})["hidden"].pow(2).mean()  # noqa: E731
    train_both(model, compiled, reference, step)
    for m in (compiled, reference):
        m.eval()
    with torch.no_grad():
        have, want = compiled({"x": x})["hidden"], reference({"x": x})["hidden"]
    assert not have.requires_grad
    close(have, want)
    with torch.inference_mode():
        close(compiled({"x": x})["hidden"], reference({"x": x})["hidden"])
    for m in (compiled, reference):
        m.train()
    train_both(model, compiled, reference, step)


def other_shapes() -> None:
    """Sizes that change: with static shapes, with Dynamo's automatic dynamic shapes, and dynamic from the start."""
    for dynamic, batches in ((False, (8, 5, 8)), (None, (8, 6, 5, 8, 1)), (True, (8, 5, 1))):
        model = MLP()
        reference, compiled = copy.deepcopy(model), sharded(model, dynamic=dynamic)
        for batch in batches:
            x = torch.randn(batch, 16)
            train_both(model, compiled, reference, lambda m, x=x: m(x).pow(2).mean())
    rich, x = Rich(), torch.randn(8, 16)
    reference, compiled = copy.deepcopy(rich), sharded(rich)
    for scale, rows in ((0.5, 8), (0.25, 8), (3, 6), (4, 6)):
        train_both(rich, compiled, reference, lambda m, s=scale, n=rows: m({"x": x[:n]}, scale=s)["hidden"].pow(2).mean())
        assert compiled({"x": x[:rows]}, scale=scale)["pair"][1] == rows
        reference({"x": x[:rows]}, scale=scale)


def input_gradients() -> None:
    model = MLP()
    reference, values = copy.deepcopy(model), torch.randn(8, 16)
    compiled = sharded(model)
    x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
    train_both(model, compiled, reference, lambda m: m(x).pow(2).mean(), lambda m: m(y).pow(2).mean())
    close(x.grad, y.grad)
    x.grad = y.grad = None
    fresh = MLP()
    fresh.load_state_dict(model.state_dict())
    forced = sharded(fresh, input_layouts={"x": "S(0)"})
    train_both(fresh, forced, reference, lambda m: m(x).pow(2).mean(), lambda m: m(y).pow(2).mean())
    close(x.grad, y.grad)
    forced(values)


def distributed_parameters(model: nn.Module, layouts: Callable[[str], list[Any]]) -> nn.Module:
    mesh = mesh_of_two()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = next(n for n, p in model.named_parameters() if p is parameter)
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, layouts(full))))
    return model


def megatron(name: str) -> list[Any]:
    if name.startswith("up."):
        return [Shard(0)]
    return [Shard(1)] if name == "down.weight" else [Replicate()]


def on_mesh(value: Tensor, placement: Any) -> DTensor:
    return distribute_tensor(value, mesh_of_two(), [placement])


def mlp_dtensor() -> None:
    for compiler in ("eager", "inductor"):
        model, values = MLP(), torch.randn(8, 16)
        reference = copy.deepcopy(model)
        distributed_parameters(model, megatron)
        x = on_mesh(values, Replicate())
        compiled = sharded(model, compiler=compiler)
        assert isinstance(compiled(x), DTensor)
        train_both(model, compiled, reference, lambda m, x=x: m(x).pow(2).mean(), lambda m, v=values: m(v).pow(2).mean())
        assert model.up.weight.placements == (Shard(0),) and model.up.weight.grad.placements == (Shard(0),)
        with torch.no_grad():
            close(compiled(x), reference(values))


def mlp_dtensor_uneven() -> None:
    """Parameters and inputs are sharded on dim 0: first a batch of 5, then another size."""
    model = MLP()
    reference, compiled = copy.deepcopy(model), sharded(model)
    distributed_parameters(model, lambda name: [Shard(0)])
    for batch in (5, 8):
        values = torch.randn(batch, 16)
        x = on_mesh(values, Shard(0))
        train_both(model, compiled, reference, lambda m, x=x: m(x).pow(2).mean(), lambda m, v=values: m(v).pow(2).mean())


def mlp_own_batches() -> None:
    """Data parallelism: each rank has its own half of the batch, and parameters are replicated DTensors."""
    model = MLP()
    reference, values = copy.deepcopy(model), torch.randn(8, 16)
    distributed_parameters(model, lambda name: [Replicate()])
    mesh = mesh_of_two()
    x = local_batch(values.chunk(2)[mesh.get_local_rank()], mesh, axis="tp")
    train_both(model, sharded(model), reference, lambda m: m(x).pow(2).mean(), lambda m: m(values).pow(2).mean())


def graph_break_dtensor() -> None:
    model, values = Broken(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    distributed_parameters(model, lambda name: [Shard(0)])
    x = on_mesh(values, Replicate())

    def step(m: Any, value: Tensor) -> Tensor:
        out, hidden = m(value)
        return out.pow(2).sum() + hidden.pow(2).sum()

    train_both(model, sharded(model), reference, lambda m: step(m, x), lambda m: step(m, values))


def llama_dtensor() -> None:
    """Megatron's layouts; Dynamo's DTensor propagation needs implicit replication and an attention that DTensor knows."""
    model, tokens = Llama.small(layers=1), torch.randint(0, 256, (4, 16))
    reference = copy.deepcopy(model)
    rows, columns = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")
    layout = lambda name: Shard(0) if name.split(".")[-2] in rows else Shard(1) if name.split(".")[-2] in columns else Replicate()  # noqa: E731
    distributed_parameters(model, lambda name: [layout(name)])
    x = on_mesh(tokens, Replicate())
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
        train_both(model, sharded(model), reference, lambda m: m(x, x), lambda m: m(tokens, tokens))


def fsdp() -> None:
    """Modules that fully_shard manages: FSDP gathers parameters and scatters gradients; all ranks have the same batch."""
    for parts in (["up", "down", ""], [""]):
        model, x = MLP(), torch.randn(8, 16)
        reference = copy.deepcopy(model)
        for part in parts:
            fully_shard(model.get_submodule(part), mesh=mesh_of_two())
        compiled = sharded(model)
        for _ in range(2):
            have, want = compiled(x), reference(x)
            close(have, want)
            have.square().sum().backward()
            want.square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad)
    plan = fxshard.plan(model, (x,), mesh_of_two(), cache=False)
    assert {str(plan.layout_of(name)) for name, _ in model.named_parameters()} == {"S(0)"} and type(model).__name__ == "FSDPMLP"


def error_of(kind: type[FxshardError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def errors() -> None:
    """Bad input raises an error on both ranks at once, and Dynamo does not wrap it."""
    rank, x = mesh_of_two().get_local_rank(), torch.randn(8, 16)
    said = error_of(RunError, lambda: sharded(MLP())(x + rank))
    assert "the value of x: rank 0: checksum " in said and "local_batch" in said
    said = error_of(RunError, lambda: sharded(MLP())(x[: 8 - rank]))
    assert "the shape of x: rank 0: (8, 16)" in said and "local_batch" in said
    torch.manual_seed(rank)
    assert "the weights of up" in error_of(RunError, lambda: sharded(MLP())(x))
    assert "rng_seed" in error_of(RunError, lambda: sharded(nn.Dropout())(x))
    torch.manual_seed(0)
    said = error_of(ConstraintError, lambda: sharded(MLP(), pins={"up.weight": "S(0)"})(x))
    assert "up.weight" in said and "plain tensor" in said and "parallelize" in said
    said = error_of(FxshardError, lambda: sharded(MLP(), pins={"up.wight": "R"})(x))
    assert "up.weight" in said
    said = error_of(FxshardError, lambda: sharded(MLP(), input_layouts={"y": "R"})(x))
    assert "'y'" in said
    assert "dim 3" in error_of(FxshardError, lambda: sharded(MLP(), input_layouts="S(3)")(x))
    other = fxshard.plan(MLP(), (torch.randn(4, 16),), mesh_of_two())
    assert "another graph" in error_of(PlanError, lambda: sharded(MLP(), plan=other)(x))
    model = distributed_parameters(MLP(), megatron)
    d = on_mesh(x, Replicate())
    said = error_of(ConstraintError, lambda: sharded(model, pins={"up.weight": "S(1)"})(d))
    assert "DTensor in S(0)" in said
    said = error_of(ConstraintError, lambda: sharded(MLP(), constraints=[fxshard.Pin("up.weight", "S(0)")])(x))
    assert "Pin('up.weight', 'S(0)') asks for parameter up.weight in S(0), but it is a plain tensor" in said
    pair = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    compiled = torch.compile(model, backend="fxshard", options={"mesh": pair, "compiler": "eager", "timeout": 60.0})
    assert "leave the option mesh out" in error_of(PlanError, lambda: compiled(d))


ALL = (
    mlp_inductor,
    llama_loss_inside,
    llama_loss_outside,
    work_is_shared,
    rich_model,
    graph_break,
    evaluate_and_train_again,
    other_shapes,
    input_gradients,
    mlp_dtensor,
    mlp_dtensor_uneven,
    mlp_own_batches,
    graph_break_dtensor,
    fsdp,
    llama_dtensor,
    errors,
)
found, test_two_ranks = two_ranks(*ALL)
