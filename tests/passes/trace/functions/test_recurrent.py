"""nn.LSTM, nn.GRU, nn.RNN and their cells are captured: solved and random plans equal one device; packing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

F64 = torch.float64
TWO, FOUR, SQUARE = (fxshard.Mesh(axes) for axes in ({"a": 2}, {"a": 4}, {"a": 2, "b": 2}))


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


def equal(model: nn.Module, args: tuple[Any, ...], mesh: fxshard.Mesh, seeds: int = 2, **options: Any) -> fxshard.ShardingPlan:
    """Compares the solver's plan, made with ``options``, and random plans with one device; returns the solver's plan."""
    reference, graph = one_device(model, args, {}), trace(model, args)
    plan = plan_graph(graph, mesh, Request(cache=False, **options))
    assert not plan.fallbacks
    annotated = annotate(graph, mesh)
    for one in (plan, *(random_graph_plan(annotated, seed) for seed in range(seeds))):
        program = lower_plan(graph, one)
        assert_equal_to_one_device(simulate_program(program, program_values(program, model, args)), reference)
    return plan


SEQUENCES = {
    "lstm of two layers, both directions": lambda: (nn.LSTM(3, 4, 2, bidirectional=True), (draw(2, 3, 3),)),
    "lstm with a projection and states": lambda: (nn.LSTM(3, 4, proj_size=2), (draw(3, 2, 3), (draw(1, 2, 2), draw(1, 2, 4)))),
    "lstm with a projection, without biases": lambda: (nn.LSTM(3, 4, bias=False, proj_size=2, batch_first=True), (draw(2, 3, 3),)),
    "gru of two layers, batch first": lambda: (nn.GRU(3, 4, 2, batch_first=True), (draw(3, 2, 3),)),
    "gru in both directions with states": lambda: (nn.GRU(3, 4, bias=False, bidirectional=True), (draw(2, 2, 3), draw(2, 2, 4))),
    "rnn": lambda: (nn.RNN(3, 4, 2), (draw(2, 2, 3),)),
    "rnn with relu": lambda: (nn.RNN(3, 4, nonlinearity="relu", bias=False), (draw(3, 2, 3),)),
    "one sequence": lambda: (nn.LSTM(3, 4), (draw(3, 3),)),
    "lstm cell": lambda: (nn.LSTMCell(3, 4), (draw(3, 3), (draw(3, 4), draw(3, 4)))),
    "gru cell": lambda: (nn.GRUCell(3, 4, bias=False), (draw(3, 3),)),
    "rnn cells": lambda: (nn.Sequential(nn.RNNCell(3, 4), nn.RNNCell(4, 4, nonlinearity="relu")), (draw(3, 3),)),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_plans_equal_one_device(name: str) -> None:
    model, args = SEQUENCES[name]()
    equal(model, args, SQUARE, seeds=1)


@pytest.mark.parametrize(("batch", "mesh"), [(5, TWO), (3, FOUR)])
def test_a_sharded_batch_needs_no_collective_in_a_step(batch: int, mesh: fxshard.Mesh) -> None:
    """Shards are uneven, one is empty. Only the gradients of weights are reduced, once for a sequence of any length."""
    counts = []
    for steps in (2, 4):
        model, args = nn.LSTM(3, 4), (draw(steps, batch, 3),)
        pins = {"input_layouts": {"args[0]": "S(1)"}, "output_layouts": {"outputs[0]": "S(1)"}}
        plan = equal(model, args, mesh, seeds=1, **pins, pins={"einsum": "S(1)"})
        counts.append(len(plan.collectives))
        assert {c.kind for c in plan.collectives} == {"all_reduce"}
        assert all(c.buffer[-1] in (3, 4) for c in plan.collectives)
        assert not fxshard.plan(model, args, mesh, train=False, cache=False, input_layouts=pins["input_layouts"]).collectives
    assert counts[0] == counts[1]


def test_the_hidden_size_of_each_gate_may_be_sharded() -> None:
    """The product of a step is [batch, gate, hidden], so a rank has all gates of its hidden units."""
    for model, product in ((nn.LSTM(3, 4), "einsum_1"), (nn.GRU(3, 5), "einsum_1"), (nn.LSTMCell(3, 4), "einsum")):
        args = (draw(3, 2, 3),) if not isinstance(model, nn.LSTMCell) else (draw(2, 3),)
        plan = equal(model, args, TWO, seeds=0, pins={product: "S(2)"})
        assert str(plan.specs[product].outputs[0]) == "S(2)"


def test_dropout_between_layers_is_the_same_on_any_mesh() -> None:
    model, x = nn.GRU(3, 4, 2, dropout=0.5), draw(2, 3, 3)
    graph, found = trace(model, (x,)), []
    for mesh in (fxshard.Mesh({"a": 1}), TWO, SQUARE):
        program = lower_plan(graph, random_graph_plan(annotate(graph, mesh), 1))
        torch.manual_seed(3)
        found.append(simulate_program(program, program_values(program, model, (x,))).outputs[0])
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-9, atol=1e-12)
    model.eval()
    assert not torch.allclose(found[0], model(x)[0])
    equal(model, (x,), TWO, seeds=0)


class UnderAutocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast_dtypes_are_torchs(kind: Any) -> None:
    model, x = UnderAutocast(kind(3, 4)).float(), draw(3, 2, 3).float()
    have = fxshard.simulate(model, (x,), mesh=TWO).outputs[0]
    try:
        want = model(x)[0]
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip(f"oneDNN has no {kind.__name__} in bfloat16 on a processor without AVX-512, so torch itself raises here")
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)


def test_the_batch_may_be_dynamic_and_the_length_may_not() -> None:
    model, x = nn.GRU(3, 4), draw(2, 4, 3)
    graph = trace(model, (x,), dynamic=dynamic_dims(model, (x,), {}, ({1: "batch"},)))
    program = lower_plan(graph, random_graph_plan(annotate(graph, TWO), 0))
    for batch in (6, 8):
        args = (draw(2, batch, 3),)
        there = program_at(program, sizes_of_call(program, args, {}))
        assert_equal_to_one_device(simulate_program(there, program_values(there, model, args)), one_device(model, args, {}))
    said = r"steps \(dim 0 of args\[0\]\) cannot change.*steps == 2 \(nn.GRU, which is written out step by step\)"
    with pytest.raises(TraceError, match=said):
        trace(model, (x,), dynamic=dynamic_dims(model, (x,), {}, ({0: "steps"},)))


class SomeSequences(nn.Module):
    """Reads the sequences with a positive sum: how many they are is known only at run time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, x.sum((0, 2)) > 0])[0].sum()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_batch_may_be_known_only_at_run_time(kind: Any) -> None:
    """Torch's own fakes of these modules ask whether it is empty."""
    model, x = SomeSequences(kind(3, 4)), draw(2, 6, 3)
    assert 0 < (x.sum((0, 2)) > 0).sum() < 6
    assert_equal_to_one_device(fxshard.simulate(model, (x,), mesh=TWO), one_device(model, (x,), {}))


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0])[0]


def test_packed_sequences_are_refused_by_name() -> None:
    with pytest.raises(TraceError, match="the result of pack_padded_sequence is a PackedSequence") as caught:
        fxshard.plan(Packs(), (draw(3, 2, 3), torch.tensor([3, 2])), TWO)
    assert "test_recurrent.py" in str(caught.value.where) and "pack_padded_sequence(x, lengths" in str(caught.value.where)
    for kind in (nn.LSTM, nn.GRU):
        with pytest.raises(TraceError, match=r"args\[0\] is a PackedSequence.*\n.*the padded tensor"):
            fxshard.plan(kind(3, 4), (pack_sequence([draw(3, 3), draw(2, 3)]),), TWO)
    assert pack_padded_sequence(draw(3, 2, 3), torch.tensor([3, 2])).data.shape == (5, 3)  # torch's own function is restored


def test_invalid_sequences_are_refused() -> None:
    with pytest.raises(TraceError, match=r"nn.LSTM gets a sequence without steps"):
        fxshard.plan(nn.LSTM(3, 4), (draw(0, 2, 3),), TWO)
    with pytest.raises(TraceError, match=r"input.size\(-1\) must be equal to input_size"):
        fxshard.plan(nn.GRU(3, 4), (draw(2, 2, 5),), TWO)
