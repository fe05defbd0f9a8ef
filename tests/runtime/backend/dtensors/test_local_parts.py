"""Which values of a captured graph are local, and what stands for DTensor's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxshard.runtime.backend.dynamo_graph import DynamoGraph, read_graph

S0, R, P = [Shard(0)], [Replicate()], [Partial()]


pytestmark = pytest.mark.usefixtures("mesh")


def read(function: Callable[..., Any], *args: Tensor) -> DynamoGraph:
    found: list[DynamoGraph] = []

    def backend(module: Any, inputs: Any) -> Any:
        found.append(read_graph(module, inputs))
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0]


def calls(graph: DynamoGraph) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in graph.module.graph.nodes if n.op.startswith("call")]


def local_inputs(graph: DynamoGraph) -> set[str]:
    return {graph.names[i] for i in graph.ends.inputs}


def test_a_chain_of_plain_operators_is_local_from_end_to_end(mesh: DeviceMesh) -> None:
    """``w`` meets the shard, ``v`` does not."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        value = DTensor.from_local(x.sin() * w, mesh, S0)
        return value.redistribute(placements=R).to_local() + v, w + 1

    graph = read(function, torch.ones(2, 4), torch.ones(4), torch.ones(4, 4))
    assert local_inputs(graph) == {"x", "w"} and not graph.ends.shards
    assert [graph.distributed[i] for i in (0, 1)] == [False, True] and graph.ends.rows == {1}
    assert calls(graph).count("row_of") == 2 and {"value_of", "placed.default", "handed_out", "stack_of"} <= set(calls(graph))


def test_replicated_ends_leave_a_chain_whole(mesh: DeviceMesh) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return DTensor.from_local(x * w, mesh, R).full_tensor() + w

    graph = read(function, torch.ones(4), torch.ones(4))
    assert not graph.ends.inputs and not graph.ends.rows and graph.distributed == (False,)
    pending = read(lambda x, w: DTensor.from_local(x * w, mesh, R).full_tensor(grad_placements=P) + w, torch.ones(4), torch.ones(4))
    assert local_inputs(pending) == {"x", "w"}, "the gradient differs among ranks"


def test_a_shard_that_only_the_caller_reads_has_no_region(mesh: DeviceMesh) -> None:
    d = DTensor.from_local(torch.ones(2, 4), mesh, S0)
    graph = read(lambda d: ((d * 2).to_local(), d.to_local() + 1), d)
    assert graph.ends.shards == {0} and graph.ends.rows == {1} and calls(graph).count("shard_of") == 1


def test_results_have_the_layout_that_dtensor_predicts(mesh: DeviceMesh) -> None:
    d = DTensor.from_local(torch.ones(2, 4), mesh, S0)
    graph = read(lambda d: (d * 2, d.redistribute(placements=R) * 2, d.sum(0)), d)
    layouts = [n.args[1] for n in graph.module.graph.find_nodes(op="call_function", target=torch.ops.fxshard.placed.default)]
    assert sorted(layouts) == ["R", "R", "S(0)"], "the redistribution, and two results"
    assert list(graph.ends.terms) == [2] and str(graph.ends.terms[2]) == "P", "the pending sum is returned by its terms"
    alone = read(lambda d: d * 2, d)
    assert calls(alone) == ["mul"] and list(map(str, alone.predicted)) == ["S(0)"], "without a call the request says it"


def test_checkpointed_blocks_are_marked_to_be_recomputed(mesh: DeviceMesh) -> None:
    d = DTensor.from_local(torch.ones(2, 4), mesh, S0)
    block = lambda d: torch.sin(d.to_local()) * 2  # noqa: E731
    graph = read(lambda d: checkpoint(block, d, use_reentrant=False) + 1, d)
    marked = [n.name for n in graph.module.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE]
    assert "sin" in marked and "tag_activation_checkpoint" not in calls(graph)
