"""flex_attention with masks and scores of its own on two ranks over gloo: eager and compiled, static and of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.distributed.scenarios import two_ranks
from tests.distributed.sizes.test_any_size import same
from tests.models.flex import VarlenAttention, both, inputs

pytestmark = pytest.mark.distributed


def _sharded(mask: str, score: str | None, lengths: Sequence[int], compiler: str, dim: int, **options: Any) -> None:
    """A step at each length with both inputs sharded on ``dim``, against the same in single operators on one device."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, dense = both(mask, score)
    parallel = {"cp": fxshard.ContextParallel(dim=dim)}
    sharded = fxshard.parallelize(model, inputs(lengths[0]), mesh, parallel=parallel, compiler=compiler, cache=False, **options)
    (program, *_) = sharded.forward.programs
    specs = [str(n.spec) for n in program.plan.nodes if n.op == "fxshard.flex_attention.default"]
    assert len(specs) == 1 and "S(" in specs[0], specs
    for length in lengths:
        same(sharded, dense, inputs(length))


def documents_in_a_sharded_sequence() -> None:
    _sharded("documents", "alibi", [12], "eager", 1)


def documents_in_an_uneven_sequence_compiled() -> None:
    _sharded("documents", "table", [7], "inductor", 1)


def a_window_in_a_sharded_batch() -> None:
    _sharded("window", None, [12], "eager", 0)


def prefixes_in_a_sharded_sequence_compiled() -> None:
    _sharded("prefix", "cap", [12], "inductor", 1)


def any_length() -> None:
    _sharded("documents", "alibi", [12, 8, 7, 3, 1], "eager", 1, dynamic_shapes={"x": {1: "length"}, "documents": {1: "length"}})


def heads_of_packed_sequences_compiled() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, dense = both(None, None, VarlenAttention)
    args = inputs(9)[0][0], torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    parallel = {"tp": {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}}
    sharded = fxshard.parallelize(model, args, mesh, parallel=parallel, compiler="inductor", cache=False)
    (program,) = sharded.forward.programs
    specs = [str(n.spec) for n in program.plan.nodes if n.op == "fxshard.varlen_attention.default"]
    assert len(specs) == 1 and specs[0].startswith("S(1), S(1), S(1)"), specs
    same(sharded, dense, args)


found, test_two_ranks = two_ranks(
    documents_in_a_sharded_sequence,
    documents_in_an_uneven_sequence_compiled,
    a_window_in_a_sharded_batch,
    prefixes_in_a_sharded_sequence_compiled,
    any_length,
    heads_of_packed_sequences_compiled,
)
