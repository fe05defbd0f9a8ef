"""``rng="torch"``: torch's generator on each rank, with equal numbers on ranks that hold the same shard and others elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.errors import OptionError
from fxshard.mesh.mesh import Mesh
from fxshard.ops.random import draw
from fxshard.runtime.backend.backend_options import backend_options
from tests.passes.tracing import Function

MESH = Mesh({"a": 2, "b": 2})
X = torch.ones(6, 8)


def model() -> nn.Module:
    return Function(lambda self, x: (F.dropout(x, 0.5), torch.rand_like(x), torch.randn(4, 4), torch.randperm(6)))


def drawn(layout: str, seed: int = 0, rng: str = "torch") -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    made = fxshard.plan(model(), (X,), MESH, train=False, output_layouts=[layout, layout, "RR", "RR"], cache=False)
    return fxshard.simulate(model(), (X,), made, rng=rng).outputs


def test_replicas_are_equal_and_shards_differ() -> None:
    """The simulator returns the first replica. Where it gathers whole values, it checks that the replicas are equal."""
    for layout in ("S(0)R", "RS(0)"):
        mask, noise, whole, order = drawn(layout)
        assert not torch.equal(mask[:3], mask[3:]) and not torch.equal(noise[:3], noise[3:])
        assert sorted(order.tolist()) == list(range(6)) and whole.shape == (4, 4)
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert all(map(torch.equal, drawn(layout), (mask, noise, whole, order))), "equal seeds give equal numbers"
        assert not any(map(torch.equal, drawn(layout, seed=1)[:3], (mask, noise, whole)))


def test_the_numbers_are_torchs_own_and_depend_on_the_mesh() -> None:
    """Each shard starts a stream of torch's generator, so the second shard is not the second half of a draw for the whole tensor."""
    halves, whole = drawn("S(0)R")[1], drawn("RR")[1]
    assert torch.equal(halves[:3], whole[:3]), "the first shard starts the same stream as the whole"
    assert not torch.equal(halves[3:], whole[3:])
    assert all(map(torch.equal, drawn("S(0)R", rng="fxshard"), drawn("RR", rng="fxshard")))


@pytest.mark.parametrize("kind", ["kept", "uniform", "normal", "integers", "permutation"])
def test_a_shard_depends_only_on_seed_draw_and_offset(kind: str) -> None:
    shape, dtype = ([64], torch.int64) if kind in ("integers", "permutation") else ([64], torch.bool if kind == "kept" else torch.float32)

    def shard(seed: int, call: int, start: int) -> torch.Tensor:
        low = 0.5 if kind == "kept" else 0
        return draw(kind, low, 1000, shape, dtype, torch.tensor(seed), call, [32], [0], [torch.tensor(start)], rng="torch")

    before = torch.get_rng_state()
    assert torch.equal(shard(5, 0, 0), shard(5, 0, 0))
    assert not any(torch.equal(shard(5, 0, 0), other) for other in (shard(6, 0, 0), shard(5, 1, 0), shard(5, 0, 32)))
    assert torch.equal(torch.get_rng_state(), before), "the user's generator is left alone"
    if kind == "permutation":  # drawn whole, then sharded
        assert sorted([*shard(5, 0, 0).tolist(), *shard(5, 0, 32).tolist()]) == list(range(64))


def test_a_file_records_the_generator(tmp_path: Path) -> None:
    program = fxshard.export(model(), (X,), MESH, rng="torch", cache=False)
    other = fxshard.export(model(), (X,), MESH, cache=False)
    assert program.hash != other.hash and program.plan.hash == other.plan.hash
    program.save(tmp_path / "m.pt2")
    loaded = fxshard.load(tmp_path / "m.pt2")
    torch.manual_seed(0)
    wanted = fxshard.simulate(program, (X,)).outputs
    torch.manual_seed(0)
    assert all(map(torch.equal, fxshard.simulate(loaded, (X,)).outputs, wanted))
    with pytest.raises(OptionError, match="rng would be ignored"):
        fxshard.simulate(loaded, (X,), rng="fxshard")


def test_other_generators_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="unknown rng 'torhc'; did you mean 'torch'"):
        backend_options({"mesh": Mesh({"a": 1}), "rng": "torhc"})
    with pytest.raises(OptionError, match="unknown rng 'numpy'"):
        fxshard.export(model(), (X,), MESH, rng="numpy")
