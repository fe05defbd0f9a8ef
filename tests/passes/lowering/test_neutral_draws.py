"""Random numbers depend only on seed, draw and element index: they are equal on every mesh and plan, and distributed like torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard._torch_compat.inductor.inductor import inductor_decompositions
from fxshard.errors import TraceError
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.kernels import device_graph
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from tests.passes.tracing import ONE, SQUARE, THREE, Function, check_draws, check_eager, real, simulated, targets

X, W = real(3, 4), real(3, 6, grad=False).abs()


def module(function: Callable[..., Any]) -> Function:
    return Function(lambda self, *args: function(*args))


DRAWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rand": lambda x, w: (torch.rand(3, 4, device=x.device), torch.rand((5,), dtype=torch.float64), torch.rand_like(x)),
    "rand by keyword": lambda x, w: torch.rand(size=(7, 2), requires_grad=False),
    "randn": lambda x, w: (torch.randn(3, 5), torch.randn([]), torch.randn_like(x, dtype=torch.float32)),
    "bernoulli": lambda x, w: (torch.bernoulli(x.sigmoid()), torch.bernoulli(x, 0.3), x.bernoulli(0.3)),
    "bernoulli_": lambda x, w: (torch.zeros(4, 5).bernoulli_(0.4), torch.zeros(3, 4).bernoulli_(x.sigmoid())),
    "uniform_": lambda x, w: torch.empty(5, 3).uniform_(1, 2),
    "normal_": lambda x, w: torch.empty(5, 3).normal_(1, std=2),
    "exponential_": lambda x, w: torch.empty(5, 3).exponential_(2.0),
    "others in place": lambda x, w: (torch.empty(5).geometric_(0.3), torch.empty(5).log_normal_(), torch.empty(5).cauchy_()),
    "normal": lambda x, w: (torch.normal(x, x.abs()), torch.normal(0.0, x.abs()), torch.normal(x, 2.0), torch.normal(0.0, 1.0, (3,))),
    "randint": lambda x, w: (torch.randint(5, (3,)), torch.randint(2, 9, (4, 2)), torch.randint(low=3, high=5, size=(6,))),
    "randint_like": lambda x, w: (torch.randint_like(x, 7), torch.randint_like(x, 3, 5, dtype=torch.int64)),
    "randperm": lambda x, w: torch.randperm(7),
    "multinomial": lambda x, w: (torch.multinomial(w, 2), w.multinomial(4, replacement=True), torch.multinomial(w[0], 1)),
    "rrelu": lambda x, w: (F.rrelu(x, training=True), F.rrelu(x * 1, training=True, inplace=True)),
    "gumbel softmax": lambda x, w: (F.gumbel_softmax(x), F.gumbel_softmax(x, hard=True)),
    "dropout": lambda x, w: (F.dropout(x, 0.5), F.dropout(x * 1, 0.25, inplace=True), torch.dropout(x, 0.5, train=True)),
    "dropout of channels": lambda x, w: (
        F.dropout1d(x, 0.5),
        F.dropout2d(x[..., None], 0.5),
        F.dropout3d(x[:, :, None, None] * 1, inplace=True),
    ),
    "alpha dropout": lambda x, w: (
        F.alpha_dropout(x, 0.3, True),
        F.feature_alpha_dropout(x, 0.3, True),
        F.alpha_dropout(x * 1, 0.3, True, True),
    ),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "in a checkpoint": lambda x, w: checkpoint(lambda y: F.dropout(y.sin(), 0.5).exp(), x, use_reentrant=False),
}


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_the_same_numbers_on_every_mesh(function: Callable[..., Any]) -> None:
    check_draws(module(function), X, W)


def _large(function: Callable[[torch.Tensor], torch.Tensor], *shape: int, train: bool = False) -> torch.Tensor:
    model, x = module(function), torch.ones(shape or (40_000,), dtype=torch.float64)
    return simulated(trace(model, (x,), train=train), ONE, model, (x,)).outputs


STATISTICS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "rand": (torch.rand_like, 1 / 2, 1 / 12),
    "randn": (torch.randn_like, 0, 1),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(2, 6), 4, 16 / 12),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2, 9),
    "normal": (lambda x: torch.normal(x * 2, 0.5), 2, 0.25),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 1 / 2, 1 / 4),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.25), 4, 12),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "randint": (lambda x: torch.randint(2, 6, x.shape).double(), 3.5, 1.25),
    "dropout": (lambda x: F.dropout(x, 0.2), 1, 0.25),
    "dropout1d": (lambda x: F.dropout1d(x.view(200, 200, 1), 0.2), 1, 0.25),
    "alpha dropout of normal numbers": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.3, training=True), 0, 1),
    "rrelu": (lambda x: F.rrelu(-x, 0.2, 0.4, training=True), -0.3, 0.04 / 12),
    "multinomial": (lambda x: torch.multinomial(x[:3] * torch.tensor([1.0, 0, 3]), 40_000, True).double(), 1.5, 0.75),
}


@pytest.mark.parametrize(("function", "mean", "variance"), STATISTICS.values(), ids=STATISTICS)
def test_mean_and_variance(function: Callable[..., Any], mean: float, variance: float) -> None:
    drawn = _large(function)
    assert drawn.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / drawn.numel()) + 1e-3)
    assert drawn.var().item() == pytest.approx(variance, rel=0.1)


def test_cauchy_has_its_quartiles() -> None:
    drawn = _large(lambda x: torch.empty_like(x).cauchy_(1.0, 2.0))
    quartiles = torch.quantile(drawn, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    torch.testing.assert_close(quartiles, torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64), rtol=0, atol=0.1)


def test_sets_are_drawn_without_replacement() -> None:
    assert sorted(_large(lambda x: torch.randperm(50), 1).tolist()) == list(range(50))
    rows = _large(lambda x: torch.multinomial(x.view(100, 5) * torch.tensor([1.0, 1, 0, 1, 1]), 4), 500)
    assert all(sorted(row) == [0, 1, 3, 4] for row in rows.tolist())


def test_each_row_of_multinomial_has_its_own_weights() -> None:
    for count, replacement in ((1, False), (5, True)):
        rows = _large(lambda x, n=count, r=replacement: torch.multinomial(x.view(4, 4) * torch.eye(4), n, r), 16)
        assert rows.tolist() == [[row] * count for row in range(4)]
        row = _large(lambda x, n=count, r=replacement: torch.multinomial(x * torch.eye(4)[2], n, r), 4)
        assert row.tolist() == [2] * count


def test_dropout_of_nothing_and_of_everything() -> None:
    x = real(5, 3)
    for p, factor in ((0.0, 1), (1.0, 0)):
        for drop in (F.dropout, F.alpha_dropout, F.dropout1d):
            result = check_draws(module(lambda x, drop=drop, p=p: drop(x * 2, p, training=True)), x)
            torch.testing.assert_close(result.outputs, x.detach() * 2 * factor)
            torch.testing.assert_close(result.grads["args[0]"], torch.full_like(x, 2.0 * factor))


def test_the_gradient_of_dropout_is_its_mask() -> None:
    x = real(50, 4)
    result = check_draws(module(lambda x: F.dropout(x, 0.4)), x)
    torch.testing.assert_close(result.grads["args[0]"], result.outputs / x.detach())
    assert 0.4 < (result.outputs != 0).double().mean().item() < 0.8


def test_whole_channels_are_dropped() -> None:
    dropped = _large(lambda x: F.dropout2d(x), 8, 16, 3, 3).flatten(2)
    assert torch.equal(dropped, dropped[..., :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_eval_draws_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(), nn.Dropout1d()).double().eval()
    graph, _ = check_eager(model, real(3, 4, 5))
    assert not graph.inputs_of("seed") and not any("fxshard" in name for name in targets(graph))


def test_each_draw_has_a_number_in_graph_order() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)  # nothing reads it, so it has no number
        return F.dropout(x, 0.5) + torch.rand_like(x) + checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False)

    numbers = {torch.ops.fxshard.dropout.default: 3, torch.ops.fxshard.random.default: 6}
    for train in (True, False):
        graph = trace(module(forward), (X,), train=train)
        assert [n.args[numbers[n.target]] for n in graph.nodes if n.target in numbers] == [0, 1, 2]
        assert len(graph.inputs_of("seed")) == 1


def test_attention_with_dropout_is_decomposed_and_listed() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(F.dropout(x, 0.5), x, x, dropout_p=0.25)

    plan = fxshard.plan(module(forward), (X,), fxshard.Mesh({"a": 2}), train=False, cache=False)
    ((node, reason),) = plan.fallbacks
    assert {n.name: n.op for n in plan.nodes}[node] == "fxshard.dropout.default" and "scaled_dot_product_attention with dropout" in reason
    assert "run as several operators" in str(plan) and reason[:40] in str(plan)


def test_equal_seeds_give_equal_numbers_and_two_draws_differ() -> None:
    model = module(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    graph = trace(model, (X,))
    first, again = (simulated(graph, mesh, model, (X,)).outputs for mesh in (SQUARE, THREE))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], first[1])


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "poisson": (lambda x: torch.poisson(x.abs()), "aten.poisson.default"),
    "binomial": (lambda x: torch.binomial(x.detach().abs().ceil(), x.detach().sigmoid()), "aten.binomial.default"),
    "native dropout by its own name": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], "aten.native_dropout.default"),
    "gamma": (lambda x: torch.distributions.Gamma(x.abs(), x.abs(), validate_args=False).sample(), "_standard_gamma"),
}


@pytest.mark.parametrize(("function", "name"), REFUSED.values(), ids=REFUSED)
def test_random_operators_that_cannot_be_keyed_are_refused_by_name(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(TraceError, match=name) as caught:
        trace(module(function), (X,))
    assert "test_neutral_draws.py" in caught.value.where and "pass the numbers in" in caught.value.remedy


@pytest.mark.parametrize("table", [None, inductor_decompositions()], ids=["eager", "inductor"])
def test_the_graph_of_the_device_draws_the_same(table: Any) -> None:
    model = module(lambda x: (torch.rand(4, 3), F.dropout(x, 0.5) * torch.tensor([1.0, 2, 3, 4]), torch.randperm(5)))
    program = lower(graph := trace(model, (X.detach(),), train=False), plan_graph(graph, ONE, Request()))
    torch.manual_seed(0)
    want = simulate_program(program, program_values(program, model, (X.detach(),))).outputs
    torch.manual_seed(0)
    values = program_values(program, model, (X.detach(),))
    got = device_graph(program.local((0,)), torch.device("cpu"), table)(*values)
    torch.testing.assert_close(tuple(got), want, rtol=0, atol=0)


def test_tracing_leaves_the_users_generator_alone() -> None:
    model = module(lambda x: (torch.rand(3), F.dropout(x, 0.5), x.clone().normal_(), torch.randperm(4), torch.bernoulli(x.sigmoid())))
    before = torch.get_rng_state()
    trace(model, (X,))
    assert torch.equal(torch.get_rng_state(), before)
