"""After all passes, a ring's keys travel beside its products."""

from __future__ import annotations

import pytest

from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import lower_plan
from fxshard.program.sharded_program import SHIFT, is_wait
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.models.context_parallel import inputs, plan_of, ring, traced


@pytest.mark.parametrize("length", [48, 50])
def test_each_shift_runs_beside_a_block(length: int) -> None:
    """Those of the forward; in the backward keys and sums, which are tiny here, share buckets instead."""
    model, graph = traced(length)
    program = lower_plan(graph, plan_of(graph, Mesh({"a": 4}, hardware="h100"), ring, 0))
    for module in program.modules.values():
        nodes = list(module.graph.nodes)
        blocks = [k for k, n in enumerate(nodes) if "block_attention" in str(n.target)]
        assert len(blocks) == 8
        starts = [k for k, n in enumerate(nodes) if n.target is SHIFT]
        waits = [nodes.index(next(filter(is_wait, nodes[k].users))) for k in starts]
        beside = [any(start < block < wait for block in blocks) for start, wait in zip(starts, waits, strict=True)]
        assert beside[:3] == [True] * 3
    result = simulate_program(program, program_values(program, model, inputs(length)))
    assert_equal_to_one_device(result, one_device(model, inputs(length)))
