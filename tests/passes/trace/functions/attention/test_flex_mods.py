"""flex_attention with masks and scores of its own is one node each way, and on shards equals the same in single operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.models.flex import MASKS, SCORES, FlexAttention, both, inputs
from tests.passes.tracing import SQUARE, THREE, TWO, simulated, targets
from tests.slices import diagonal

CASES = [*((mask, None) for mask in MASKS), *((None, score) for score in SCORES), ("documents", "alibi"), ("prefix", "table")]
NODES = {"fxshard.flex_attention.default", "fxshard.flex_attention_backward.default"}


@pytest.mark.parametrize(("case", "length", "mesh"), diagonal([c for c in CASES if c != ("causal", None)], [8, 7], [TWO, SQUARE, THREE]))
def test_it_equals_single_operators(case: tuple[str | None, str | None], length: int, mesh: fxshard.Mesh) -> None:
    model, dense = both(*case)
    graph = trace(model, inputs(length))
    assert targets(graph) >= NODES
    assert not annotate(graph, TWO).fallbacks
    reference = one_device(dense, inputs(length))
    assert_equal_to_one_device(simulated(graph, mesh, model, inputs(length), plan=mesh.size), reference, 1e-9)


def test_nothing_as_large_as_the_scores_is_left() -> None:
    """The lists of blocks that ``create_block_mask`` makes in the forward are not needed."""
    graph = trace(both("documents", "alibi")[0], inputs(16))
    values = [n.meta["val"] for n in graph.module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert not [v for v in values if v.ndim >= 2 and tuple(v.shape[-2:]) == (16, 16)]


def test_inference_has_one_node() -> None:
    model, dense = both("window", "alibi")
    graph = trace(model, inputs(8), train=False)
    assert [n for n in targets(graph) if "flex" in n] == ["fxshard.flex_attention.default"]
    result = simulated(graph, SQUARE, model, inputs(8), plan=3)
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(result.outputs)[0], dense(*inputs(8)), rtol=1e-9, atol=1e-12)


def test_batch_heads_and_queries_are_sharded() -> None:
    graph = trace(both("documents", "alibi")[0], inputs(8))
    annotated = annotate(graph, TWO)
    for node in graph.module.graph.nodes:
        if str(node.target) in NODES:
            outputs = {str(spec.outputs[0]) for spec in annotated.specs[node.name]}
            assert outputs >= {"S(0)", "S(1)", "S(2)"}, node.name


@pytest.mark.parametrize("length", [8, 7])
def test_the_plan_of_the_solver(length: int) -> None:
    """With a sharded sequence, queries are sharded, and keys are whole."""
    model, dense = both("documents", "table")
    plan = fxshard.plan(model, inputs(length), SQUARE, parallel={("a", "b"): fxshard.ContextParallel(dim=1)}, train=True, cache=False)
    (spec,) = (n.spec for n in plan.nodes if n.op == "fxshard.flex_attention.default")
    assert spec.inputs[0].axes_on(2) and not spec.inputs[1].axes_on(2)
    program = lower(trace(model, inputs(length)), plan)
    result = simulate_program(program, program_values(program, model, inputs(length)))
    assert_equal_to_one_device(result, one_device(dense, inputs(length)), 1e-9)


class OfItsLength(FlexAttention):
    """The mask depends on the length of the sequence."""

    def mods(self, documents: torch.Tensor) -> tuple[Any, Any]:
        length = documents.shape[1]
        return None, lambda b, h, q, k: (q >= k) & (k >= length // 2 - 2) | (q + k < length)


def test_a_dynamic_size_in_a_mask() -> None:
    """One program for all lengths, even and uneven."""
    model, dense = both(None, None, OfItsLength)
    dims = {"x": {1: torch.export.Dim("length", min=2)}, "documents": {1: torch.export.Dim("length", min=2)}}
    parallel = {"a": fxshard.ContextParallel(dim=1)}
    program = fxshard.export(model, inputs(12), TWO, parallel=parallel, cache=False, dynamic_shapes=dims)
    for length in (12, 8, 7, 3):
        result = fxshard.simulate(program, inputs(length))
        found = torch.utils._pytree.tree_leaves(result.outputs)[0]
        torch.testing.assert_close(found, dense(*inputs(length)), rtol=1e-9, atol=1e-12)
