"""The bytes of torch's own planners: their transforms, counted with the ring formulas at ceil sizes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached as transforms_of

from fxshard.layout.layouts import Layout
from fxshard.layout.steps import reductions_commute
from fxshard.mesh.mesh import Mesh

PLANNERS = {"greedy": False, "min-cost": True}


@dataclass(frozen=True)
class Sent:
    """``bytes`` that a rank sends; ``as_gathered``: the same if an all-to-all is an all-gather of which a chunk is kept, as in torch on
    gloo."""

    bytes: int
    as_gathered: int
    steps: int


@contextlib.contextmanager
def fake_ranks(mesh: Mesh) -> Iterator[Any]:
    """A torch DeviceMesh of this shape on a fake process group."""
    dist.init_process_group("fake", rank=0, world_size=mesh.size)
    try:
        yield init_device_mesh("cpu", mesh.shape)
    finally:
        dist.destroy_process_group()


def sent(device_mesh: Any, source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, planner: str) -> Sent | None:
    """The bytes of one planner; None if torch has no path: reductions of several kinds are pending, or a shard would become pending."""
    if not reductions_commute(source) or not reductions_commute(target):
        return None
    like = torch.empty(shape, dtype={4: torch.float32, 8: torch.float64}[itemsize], device="meta")
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    have, want = (DTensorSpec(device_mesh, tuple(layout), tensor_meta=meta) for layout in (source, target))
    state = _State(list(source), shape, tuple(device_mesh.shape))
    total = [0, 0, 0]
    for one in transforms_of(have, want, use_graph_based_transform=PLANNERS[planner]):
        before, to = one.src_dst_placements
        if isinstance(to, Partial) and not isinstance(before, Replicate):
            return None
        first, second = state.step(one.mesh_dim, before, to)
        total = [total[0] + first * itemsize, total[1] + second * itemsize, total[2] + 1]
    assert state.placements == list(target), f"{source} -> {target} ended at {state.placements}"
    return Sent(*total)


@dataclass
class _State:
    """The placements, and for each dim the axes that shard it, in the order in which they split it."""

    placements: list[Any]
    shape: tuple[int, ...]
    mesh: Sequence[int]

    def __post_init__(self) -> None:
        self.order = {d: [a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == d] for d in range(len(self.shape))}

    def sizes(self) -> list[int]:
        found = list(self.shape)
        for dim, axes in self.order.items():
            for axis in axes:
                found[dim] = -(-found[dim] // self.mesh[axis])
        return found

    def step(self, axis: int, source: Any, target: Any) -> tuple[int, int]:
        """Applies a transform; returns the elements that a rank sends, and the same with an all-to-all counted as an all-gather."""
        n, before = self.mesh[axis], self.sizes()
        assert self.placements[axis] == source
        if isinstance(source, Shard):
            assert self.order[source.dim].pop() == axis, "torch stops sharding a dim on an axis while an inner axis still shards it"
        if isinstance(target, Shard):
            self.order[target.dim].append(axis)
        self.placements[axis] = target
        after = self.sizes()
        if isinstance(source, Partial):
            count = -(-2 * (n - 1) * math.prod(before) // n) if isinstance(target, Replicate) else (n - 1) * math.prod(after)
            return count, count
        if isinstance(source, Shard):
            gathered = (n - 1) * math.prod(before)
            return ((n - 1) * math.prod(map(min, before, after)) if isinstance(target, Shard) else gathered), gathered
        return 0, 0
