"""Styles on a mesh of 2x2, dp and tp, on four gloo ranks: against one device, FSDP over tensor
parallelism against eager torch, and a profile of a step."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fxshard
from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import FxshardError
from tests.distributed.module.test_fully_shard import step_of
from tests.distributed.module.test_parallelize import same
from tests.distributed.module.test_styles import LINEAR, ColumnsThenRows, Decoder, equal, made, train, two_layers, whole
from tests.distributed.scenarios import on_ranks
from tests.packed_models import made as packed

pytestmark = pytest.mark.distributed

WILDCARDS = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.?.attention.wo": RowwiseParallel(),
    "layers.[0-1].up": ColwiseParallel(),
    "layers.*.dow[!x]": RowwiseParallel(),
}


def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tokens(add: int = 1) -> torch.Tensor:
    return torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(add))


def wildcards_of_each_kind() -> None:
    reference = made(two_layers)
    want = train(reference, tokens())
    model = fxshard.parallelize_module(made(two_layers), mesh(), {"dp": fxshard.FullyShard(), "tp": WILDCARDS}, compiler="eager")
    torch.testing.assert_close([whole(x) for x in train(model, tokens())], want, rtol=1e-9, atol=1e-12)
    equal(model, reference)
    for layer in model.layers:
        styled = layer.attention.wq, layer.attention.wo, layer.up, layer.down
        assert [m.weight.placements[1] for m in styled] == [Shard(0), Shard(1), Shard(0), Shard(1)]
        assert all(m.weight.placements[0] != Replicate() for m in styled)


def heads_of_a_packed_weight() -> None:
    """Beside heads of [q | k | v] on tp, FullyShard shards the weight's other dim on dp. The bias of keys has a gradient of zero but for
    rounding, which Adam divides by itself: it is frozen."""
    model, x = packed("fewer pairs")
    model.packed.bias.requires_grad_(False)
    reference, whole = copy.deepcopy(model), x.detach()
    plan = {"dp": fxshard.FullyShard(), "tp": {"packed": "packed_colwise", "out": "rowwise"}}
    fxshard.parallelize(model, (whole,), mesh(), parallel=plan, compiler="eager")
    assert model.packed.weight.placements == (Shard(1), PackedShard(0, (8, 4, 4)))
    torch.testing.assert_close(train(model, whole), train(reference, whole), rtol=1e-9, atol=1e-12)
    equal(model, reference)


def a_part_of_the_mesh() -> None:
    """The styles' axis only: each pair of ranks has a batch of its own."""
    both, reference = mesh(), made()
    own = tokens(2 + both.get_local_rank("dp"))
    want = train(reference, own)
    model = fxshard.parallelize_module(made(), both["tp"], LINEAR, compiler="eager")
    torch.testing.assert_close(train(model, own), want, rtol=1e-9, atol=1e-12)
    equal(model, reference)


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4))


def a_users_style() -> None:
    plan = {"dp": fxshard.DataParallel(), "tp": {"0": ColumnsThenRows()}}
    model = fxshard.parallelize_module(made(net), mesh(), plan, compiler="eager")
    assert model[0].weight.placements[1] == Shard(0)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reference = made(net)
    torch.testing.assert_close([whole(v) for v in train(model, x)], train(reference, x), rtol=1e-9, atol=1e-12)
    equal(model, reference)


def fsdp_over_tensor_parallelism() -> None:
    """torch's parallelize_module, then fully_shard; compiled, and eager. Each dp rank has a batch of its own."""
    both = mesh()
    own = tokens(2 + both.get_local_rank("dp"))
    models = [_fully_sharded(both) for _ in range(2)]
    models[0].compile(backend="fxshard", options={"compiler": "eager", "timeout": 60.0})
    have, want = (train(model, own) for model in models)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)
    equal(*models)


def local_results_of_fsdp_over_tensor_parallelism() -> None:
    """The rank's rows, in each form that the last style says, also where other layouts of so small a model would cost less."""
    both, single = mesh(), made(net)
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = rows.chunk(2)[both.get_local_rank("dp")]
    for layout in (Replicate(), Shard(1), Shard(0)):
        model = copy.deepcopy(single)
        down = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
        parallel.parallelize_module(model, both["tp"], {"0": ColwiseParallel(output_layouts=Replicate()), "2": down})
        fully_shard(model, mesh=both["dp"])
        passed = fxshard.local_batch(mine, both, axis="dp")
        have = fxshard.parallelize(model, (passed,), both, compiler="eager", train=False)(passed)
        want = single(mine) if layout.is_replicate() else single(mine).chunk(2, layout.dim)[both.get_local_rank("tp")]
        torch.testing.assert_close(have, want.detach(), rtol=1e-9, atol=1e-12)


class Turned(nn.Module):
    """Dims 0 and 1 of its input change places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def local_results_without_the_dim_of_the_batch() -> None:
    """Rows that are flattened stay the rank's; for a batch that is no dim of the result where it was, the layout has to be said."""
    both, single = mesh(), made(net)
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x.chunk(2)[both.get_local_rank("dp")]
    passed = fxshard.local_batch(mine, both, axis="dp")
    for before, want in ((nn.Flatten(0, 1), single(mine.flatten(0, 1))), (Turned(), single(mine.transpose(0, 1)))):
        model, said = nn.Sequential(before, copy.deepcopy(single)), {}
        parallel.parallelize_module(model, both["tp"], {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()})
        if isinstance(before, Turned):
            with pytest.raises(
                FxshardError, match=r"outputs\[0\] is returned as this rank's part, and none of its dims is dim 0(.|\n)*output_layouts="
            ):
                fxshard.parallelize(model, (passed,), both, compiler="eager", train=False)
            said = {"output_layouts": {"outputs[0]": {"dp": Shard(1)}}}
        have = fxshard.parallelize(model, (passed,), both, compiler="eager", train=False, **said)(passed)
        torch.testing.assert_close(have, want.detach(), rtol=1e-9, atol=1e-12)


def _fully_sharded(both: Any) -> Any:
    model = made(Decoder)
    parallel.parallelize_module(model, both["tp"], LINEAR)
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    return model


def a_measured_step() -> None:
    """A profile has every collective of the program on its axis, the reduce-scatters of gradients too, which gloo gets as all-to-alls."""
    plan = {"dp": fxshard.FullyShard(), "tp": fxshard.TensorParallel()}
    model = fxshard.parallelize_module(made(Decoder), mesh(), plan, compiler="eager")
    train(model, tokens())
    program = model.forward.programs[0]
    want = Counter(c.axis for c in program.collectives)
    assert want["dp"] and want["tp"] and "reduce_scatter" in {c.kind for c in program.collectives}
    measured = fxshard.profile_step(lambda: model(tokens()).square().sum().backward(), program).measured
    for found in (measured.under_way, measured.waits):
        counted = Counter(axis for axis, _ in found)
        assert counted == want, (counted, want)
    assert all(measured.communicating(axis) > 0 for axis in want)


class Halves(nn.Module):
    """Columns and rows for tensor parallelism, and a norm that is not in its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def fully_sharded_beside_tensor_parallelism() -> None:
    """Both shard dim 0 of the columns. Afterwards fully_shard shards dim 1, or of a vector dim 0 first, and the norm is on both axes;
    the optimiser's states from before follow, also those that are loaded later. If planning fails, all is as it was."""
    torch.set_default_dtype(torch.float64)
    device_mesh = mesh()
    model, x = Halves(), torch.randn(8, 6)
    reference, rows = copy.deepcopy(model), x.chunk(2)[device_mesh["dp"].get_local_rank()]
    parallel.parallelize_module(model, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=device_mesh["dp"])
    held, strided = list(model.parameters()), model.up.weight.placements
    assert type(strided[0]) is not Shard
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, reference))
    for _ in range(2):
        step_of(model, rows, mine)
        step_of(reference, x, theirs)
        with pytest.raises(FxshardError, match="matches no"):
            fxshard.parallelize(model, (x,), device_mesh, compiler="eager", pins={"nothing": "R"})
        assert isinstance(model, FSDPModule) and model.up.weight.placements == strided
    saved = copy.deepcopy((mine.state_dict(), theirs.state_dict()))
    fxshard.parallelize(model, (x,), device_mesh, compiler="eager")
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    assert model.up.weight.placements == (Shard(1), Shard(0)) and model.up.bias.placements == (Shard(0), Shard(0))
    for loaded in (False, True):
        if loaded:
            mine.load_state_dict(saved[0])
            theirs.load_state_dict(saved[1])
        for _ in range(2):
            same(step_of(model, x, mine), step_of(reference, x, theirs))
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                same(p.detach(), q.detach())
                assert mine.state[p]["exp_avg"].placements == p.placements


found, test_four_ranks = on_ranks(
    4,
    fully_sharded_beside_tensor_parallelism,
    wildcards_of_each_kind,
    heads_of_a_packed_weight,
    a_part_of_the_mesh,
    a_users_style,
    fsdp_over_tensor_parallelism,
    local_results_of_fsdp_over_tensor_parallelism,
    local_results_without_the_dim_of_the_batch,
    a_measured_step,
)
