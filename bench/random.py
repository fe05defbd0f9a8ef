"""Random numbers, compiled: fxshard's draws on a mesh of one rank compared with torch's own, forward and backward, on one thread.

    python -m bench.random [--size N] [--repeats N] [--device cpu|cuda]

Each row is a function of a matrix (size x size, float32), compiled by Inductor directly and through ``backend="fxshard"``. Times are
medians of calls that take turns. The ratio is the median over the turns of fxshard's time over torch's. The compile time is that of the
first call, without caches. ``x * 2`` draws nothing: its time is the fixed cost of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxshard.mesh.mesh import Mesh
from fxshard.text_table import fitted


class Body(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "x * 2": lambda x: x * 2,
    "x * rand": lambda x: x * torch.rand_like(x),
    "x * randn": lambda x: x * torch.randn_like(x),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.size, options.size, device=options.device)
    rows = [row(name, function, x, options.repeats) for name, function in FUNCTIONS.items()]
    print(fitted(rows, ("function", "step torch ms", "step ours ms", "ratio", "forward ratio", "compile torch s", "compile ours s")))


def row(name: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, repeats: int) -> tuple[Any, ...]:
    """(name, ms of a step of torch's, of ours, the ratio, the ratio of the forward alone, seconds to compile torch's, ours)."""
    torch._dynamo.reset()
    model, ours = Body(function), {"mesh": Mesh({"a": 1}), "cache": False}
    runs = [torch.compile(model), torch.compile(model, backend="fxshard", options=ours)]
    steps = [_step(run, x.clone().requires_grad_()) for run in runs]
    compiling = [_seconds(step, x) for step in steps]
    forwards = [_forward(run, x) for run in runs]
    for forward in forwards:
        forward()
    both, alone = _turns(steps, x, repeats), _turns(forwards, x, repeats)
    times = [f"{statistics.median(t) * 1e3:.1f}" for t in both]
    return (name, *times, _ratio(both), _ratio(alone), *(f"{s:.1f}" for s in compiling))


def _step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], Any]:
    ones = torch.ones_like(x)

    def step() -> None:
        x.grad = None
        run(x).backward(ones)

    return step


def _forward(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], Any]:
    def forward() -> None:
        with torch.no_grad():
            run(x)

    return forward


def _turns(calls: list[Callable[[], Any]], x: torch.Tensor, repeats: int) -> list[list[float]]:
    """Seconds of each call, in turns."""
    turns = [[_seconds(call, x) for call in calls] for _ in range(repeats)]
    return [list(column) for column in zip(*turns, strict=True)]


def _seconds(call: Callable[[], Any], x: torch.Tensor) -> float:
    start = time.perf_counter()
    call()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _ratio(times: list[list[float]]) -> str:
    return f"{statistics.median(ours / torchs for torchs, ours in zip(*times, strict=True)):.2f}"


if __name__ == "__main__":
    main()
