"""Draws expanded to arithmetic for the compiler have the bits of the operators; the backward draws masks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.mesh.mesh import Mesh
from fxshard.ops.random import draw
from fxshard.passes.trace.trace import trace
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.rank_graph.expand_draws import expand_draws
from tests.passes.tracing import ONE, Function, simulated

OPS = torch.ops.fxshard
SEED = torch.tensor(2**61 + 77)


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="fxshard", options={"mesh": Mesh({"a": 1}), "cache": False, **options})


def graph_of(*targets: Callable[[fx.Graph, list[fx.Node]], fx.Node]) -> fx.GraphModule:
    """A graph (seed, row of the rank, column of the rank) -> results of ``targets``."""
    graph, mode = fx.Graph(), FakeTensorMode()
    places = [graph.placeholder(name) for name in ("seed", "row", "column")]
    for node in places:
        node.meta["val"] = mode.from_tensor(torch.tensor(0))
    results = [target(graph, places) for target in targets]
    for node in results:
        args = fx.map_arg(node.args, lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = node.target(*args)
    graph.output(tuple(results))
    return fx.GraphModule(nn.Module(), graph)


def mask(call: int) -> Callable[[fx.Graph, list[fx.Node]], fx.Node]:
    return lambda g, n: g.call_function(OPS.keep_mask.default, (0.4, n[0], call, [9, 5, 7], [3, 5, 4], [0, 2], n[1:]))


def uniform(call: int, dtype: torch.dtype) -> Callable[[fx.Graph, list[fx.Node]], fx.Node]:
    cpu = torch.device("cpu")
    args = ("uniform", 0, 0, [9, 5, 7], dtype)
    return lambda g, n: g.call_function(OPS.random_shard.default, (*args, n[0], call, [3, 5, 4], [0, 2], n[1:], cpu))


def test_the_arithmetic_has_the_bits_of_the_operators() -> None:
    module = graph_of(mask(3), uniform(9, torch.float32), uniform(4, torch.bfloat16), mask(7))
    places = SEED, torch.tensor(6), torch.tensor(3)
    wanted = module(*places)
    assert expand_draws(module) == 4
    names = [str(n.target) for n in module.graph.nodes]
    assert names.count("fxshard.draw_keys.default") == 1 and not any("keep_mask" in n or "random_shard" in n for n in names)
    for have, want in zip(module(*places), wanted, strict=True):
        assert torch.equal(have, want) and have.dtype == want.dtype
    whole = draw("kept", 0.4, 0, [9, 5, 7], torch.bool, SEED, 3)
    assert torch.equal(wanted[0], whole[6:9, :, 3:7])


def test_float64_draws_stay_operators() -> None:
    module = graph_of(uniform(1, torch.float64), mask(0))
    assert expand_draws(module) == 1
    assert [str(n.target) for n in module.graph.nodes].count("fxshard.random_shard.default") == 1


def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    noise = torch.randn_like(x), torch.rand_like(x), torch.rand(33, 5, dtype=torch.float64), torch.randperm(11)
    return (F.dropout(x, 0.3), F.dropout(x.sin(), 0.5) * 2, F.dropout(x, 1.0), torch.bernoulli(x.sigmoid()), *noise)


def test_inductor_draws_what_the_simulator_draws() -> None:
    """Both take as seed the first number of the default generator."""
    x = torch.linspace(-2, 2, 41 * 19).view(41, 19)
    model = Function(lambda self, x: draws(x))
    wanted = simulated(trace(model, (x,), train=False), ONE, model, (x,)).outputs
    for options in ({}, {"compiler": "eager"}):
        run = compiled(model, **options)
        torch.manual_seed(1234)
        with torch.no_grad():
            for have, want in zip(run(x), wanted, strict=True):
                torch.testing.assert_close(have, want, rtol=1e-6, atol=0)
                assert torch.equal(have == 0, want == 0)


def test_the_state_can_be_saved_and_restored() -> None:
    x = torch.ones(40, 10)
    run = compiled(Function(lambda self, x: (F.dropout(x), torch.rand_like(x))), compiler="eager")
    torch.manual_seed(5)
    first = run(x)
    state = torch.get_rng_state()
    second = run(x)
    torch.set_rng_state(state)
    again = run(x)
    assert all(map(torch.equal, second, again)) and not any(map(torch.equal, first, second))


class Twice(nn.Module):
    """A dropout inside of a checkpoint, and one outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: F.dropout(y.sin(), 0.5).cos(), x, use_reentrant=False)
        return F.dropout(inner * x, 0.25)


def gradient(run: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    out = run(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), grad


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_a_checkpoint_inside_repeats_the_draw(compiler: str) -> None:
    x = torch.linspace(0.5, 2, 600).view(30, 20).requires_grad_()
    out, grad = gradient(compiled(Twice(), compiler=compiler), x)
    outer = out != 0  # out = m2 c / 0.75 with c = cos(s) x, s = m1 sin(x) / 0.5: the gradient shows which masks m1, m2 the backward used
    for inner in (0.0, 2.0):
        s, c = inner * x.sin(), x * (inner * x.sin()).cos()
        same = outer & torch.isclose(out, c / 0.75, rtol=1e-5)
        want = 2 * out / 0.75 * (s.cos() - x * s.sin() * inner * x.cos())
        assert same.sum() > 100
        torch.testing.assert_close(grad[same], want[same].detach(), rtol=1e-4, atol=1e-5)
    assert not grad[~outer].any()


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_a_checkpoint_around_repeats_the_draw(compiler: str) -> None:
    x = torch.linspace(0.5, 2, 600).view(30, 20).requires_grad_()
    run = compiled(Function(lambda self, x: F.dropout(x.sin(), 0.5)), compiler=compiler)
    wanted = gradient(run, x)
    have = gradient(lambda x: checkpoint(run, x, use_reentrant=False), x)
    assert all(map(torch.equal, have, wanted))


def test_the_backward_draws_the_mask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor only inputs are saved. In eager mode the mask is saved, because a second draw costs more there."""
    import fxshard.runtime.backend.backend as backend

    made: list[CompiledProgram] = []
    compile_program = backend.compile_program
    monkeypatch.setattr(backend, "compile_program", lambda *args: made.append(compile_program(*args)) or made[-1])
    x = torch.ones(40, 10, requires_grad=True)
    for compiler in ("inductor", "eager"):
        compiled(Function(lambda self, x: F.dropout(x.sin(), 0.5)), compiler=compiler)(x)
    kept = [[str(n.meta["val"].dtype) for n in p.artefact.graphs[1].graph.nodes if n.op == "placeholder"] for p in made]
    assert "torch.bool" not in kept[0] and "torch.bool" in kept[1]
