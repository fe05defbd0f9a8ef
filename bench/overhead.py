"""``python -m bench.overhead``: microseconds of small calls with and without fxshard: medians of calls that take turns in one run.

One process; torch's ``fake`` process group, whose collectives return at once, stands for the other rank.

- A layer of two 8x8 products, sharded as in Megatron, forward and backward: the parallelized module relative to the same local products
compiled by torch, once with the same two all-reduces as functional collectives and once without.
- One addmm: the bound program on local tensors relative to eager DTensor; the backend under ``torch.compile`` relative to torch's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fxshard
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.rank_graph.bind import bind

RANKS, SIZE, CALLS, ROUNDS = 2, 8, 50, 40


class Layer(nn.Module):
    """Two products without biases, ``size`` x ``hidden`` and back."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, hidden, bias=False), nn.Linear(hidden, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Summed(torch.autograd.Function):
    """An all-reduce whose gradient passes unchanged, or an identity whose gradient is all-reduced: Megatron's g and f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, now: bool) -> Tensor:
        ctx.group, ctx.now = group, now
        return all_reduce(x, "sum", group) if now else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad if ctx.now else all_reduce(grad, "sum", ctx.group)), None, None


class Communicating(Layer):
    """The local part of the layer with its two all-reduces."""

    def __init__(self, hidden: int, group: Any) -> None:
        super().__init__(hidden)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Summed.apply(super().forward(Summed.apply(x, self.group, False)), self.group, True)
        return out


def layer_ways(mesh: DeviceMesh) -> Mapping[str, Callable[[], Any]]:
    x, ones = torch.randn(SIZE, SIZE, requires_grad=True), torch.ones(SIZE, SIZE)
    pins = {"up.weight": "S(0)", "down.weight": "S(1)", "up": "S(1)", "down": "P"}  # of its own the planner gathers weights this small
    pins["einsum_4"] = "P"  # and one of them for the gradient of x
    ours = fxshard.parallelize(Layer(SIZE * RANKS), (x,), mesh, pins=pins, src_data_rank=None)
    assert [c.kind for c in ours.forward.programs[0].collectives] == ["all_reduce", "all_reduce"]
    plain = torch.compile(Layer(SIZE))
    both = torch.compile(Communicating(SIZE, mesh.get_group()))

    def stepping(model: Any) -> Callable[[], Any]:
        inputs = [x, *model.parameters()]
        return lambda: torch.autograd.grad(model(x), inputs, ones)

    return {"fxshard": stepping(ours), "local, with collectives": stepping(both), "local, without": stepping(plain)}


def addmm_ways(mesh: DeviceMesh) -> Mapping[str, Callable[[], Any]]:
    bias, a, b = torch.randn(SIZE), torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    class Addmm(nn.Module):
        def forward(self, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return torch.addmm(bias, a, b)

    layouts = {"input_layouts": ["R", "S(0)", "R"], "output_layouts": "S(0)"}
    graph = trace(Addmm(), (bias, a, b), train=False)
    plan = plan_graph(graph, fxshard.Mesh({"tp": RANKS}), Request(train=False, cache=False, **layouts))
    bound = compile_program(bind(lower_plan(graph, plan), mesh))
    local = [bias, a[: SIZE // RANKS].contiguous(), b]
    placements = [[Replicate()], [Shard(0)], [Replicate()]]
    shared = [
        DTensor.from_local(t, mesh, p) if p == [Shard(0)] else distribute_tensor(t, mesh, p) for t, p in zip(local, placements, strict=True)
    ]
    compiled = torch.compile(Addmm(), backend="fxshard", options={"mesh": mesh})
    plain = torch.compile(Addmm())
    calls = {
        "fxshard, bound program": lambda: bound(local),
        "DTensor, eager": lambda: torch.addmm(*shared),
        "fxshard, through torch.compile": lambda: compiled(bias, a, b),
        "plain, compiled": lambda: plain(bias, a, b),
    }

    def quietly(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    return {name: quietly(call) for name, call in calls.items()}


def times(ways: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Microseconds per call in each round; the ways take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(CALLS):
            call()
    for _ in range(ROUNDS):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return found


PAIRS = (
    ("layer, forward and backward", "fxshard", "local, with collectives"),
    ("layer, forward and backward", "fxshard", "local, without"),
    ("one addmm", "fxshard, bound program", "DTensor, eager"),
    ("one addmm", "fxshard, through torch.compile", "plain, compiled"),
)
"""What is timed, fxshard's way and the other."""


def measured() -> dict[str, list[float]]:
    """The times of all ways, in one process of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    found = times(layer_ways(mesh)) | times(addmm_ways(mesh))
    dist.destroy_process_group()
    return found


def main() -> None:
    medians = {name: statistics.median(us) for name, us in measured().items()}
    rows = [
        (what, mine, f"{medians[mine]:.1f}", other, f"{medians[other]:.1f}", f"{medians[mine] / medians[other]:.2f}")
        for what, mine, other in PAIRS
    ]
    print(tabulate(rows, headers=("what", "fxshard's way", "us", "the other", "us", "ratio"), disable_numparse=True))


if __name__ == "__main__":
    main()
