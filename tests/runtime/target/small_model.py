"""A perceptron with attention in bfloat16: what the tests of targets compile. Run as a script, it prints reports as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
from torch import nn

import fxshard
from fxshard.mesh.mesh import parse_mesh
from fxshard.program.sharded_program import is_collective
from fxshard.runtime.target.compile_for import compile_for

WIDTH = 64
PINS = {"up.weight": "RS(0)", "down.weight": "RS(1)", "args[0]": "S(0)R"}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).unflatten(-1, (4, -1)).transpose(1, 2)
        h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(-2)
        return (x + self.down(nn.functional.gelu(self.up(h)))).float().square().mean()


def model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Small().bfloat16(), (torch.randn(4, 16, WIDTH, dtype=torch.bfloat16),)


def main(targets: list[str]) -> None:
    net, args = model()
    plan = fxshard.plan(net, args, parse_mesh("dp=2,tp=2", "h100"), pins=PINS)
    program = fxshard.lower(net, args, plan)
    rank = (1, 0)
    expected = Counter(_kind_and_axis(n) for n in program.local(rank).graph.nodes if is_collective(n))
    reports = [compile_for(program, target, rank).to_json() for target in targets]
    print(json.dumps({"expected": sorted([*key, count] for key, count in expected.items()), "reports": reports}))


def _kind_and_axis(node: torch.fx.Node) -> tuple[str, str]:
    names = {"dp", "tp"}
    return str(node.target).split(".")[1], next(a for a in node.args if isinstance(a, str) and a in names)


if __name__ == "__main__":
    main(sys.argv[1:])
