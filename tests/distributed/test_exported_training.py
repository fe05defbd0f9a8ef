"""Exported training programs on two gloo ranks, beside the live sharded model and one device: three steps, with the optimiser's step inside
or outside, compiled by Inductor or eager, and with the weights in a file per rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from tests.distributed.fresh import run_fresh

MODEL = """
class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, x, y):
        return (self.down(self.norm(self.up(x)).tanh()) - y).square().mean()

def made():
    torch.manual_seed(0)
    return Regression().double()
"""
RANK = f"""
from torch import nn
{MODEL}
batches = load_file(folder + "/batches.safetensors")
pairs = [(batches[f"x{{i}}"], batches[f"y{{i}}"]) for i in range(3)]
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
out = {{}}

def note(name, model, losses):
    out[name + ".losses"] = torch.stack(losses)
    out.update({{name + "." + key: p.detach().full_tensor().contiguous() for key, p in model.named_parameters() if "optimizer" not in key}})

def train(name, model):
    optimizer, losses = adamw(model.parameters()), []
    for pair in pairs:
        optimizer.zero_grad()
        loss = model(*pair)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    note(name, model, losses)

train("live", fxshard.parallelize(made(), pairs[0], mesh, compiler="eager", pins={{"up.weight": "S(0)"}}))
train("outside", fxshard.load(folder + "/joint.pt2").bind(mesh, compiler="eager"))
for name, compiler in (("inside", "inductor"), ("inside", "eager"), ("apart", "eager")):
    program = fxshard.load(f"{{folder}}/{{name}}.pt2")
    model = program.bind(mesh, compiler=compiler)
    note(name + compiler, model, [model(*pair).detach().clone() for pair in pairs])
    moment = model.get_parameter("optimizer.up.weight.exp_avg")
    assert moment.to_local().shape[0] < 9 and moment.to_local().abs().sum() > 0, "the state is sharded like its parameter"
    again = program.bind(mesh, compiler="eager")
    assert not again.get_parameter("optimizer.up.weight.exp_avg").to_local().any(), "training changed the program's own weights"
"""


@pytest.mark.distributed
def test_three_steps(tmp_path: Path) -> None:
    space: dict[str, object] = {"nn": nn, "torch": torch}
    exec(MODEL, space)
    model: nn.Module = space["made"]()  # type: ignore[operator]
    torch.manual_seed(1)
    pairs = [(torch.randn(4, 6).double(), torch.randn(4, 3).double()) for _ in range(3)]
    save_file(
        {f"{name}{i}": t for i, pair in enumerate(pairs) for name, t in zip("xy", pair, strict=True)}, tmp_path / "batches.safetensors"
    )
    mesh, options = fxshard.Mesh({"tp": 2}), {"pins": {"up.weight": "S(0)"}, "train": True}
    fxshard.export(model, pairs[0], mesh, **options).save(tmp_path / "joint.pt2")
    stepping = fxshard.export(model, pairs[0], mesh, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    stepping.save(tmp_path / "inside.pt2")
    stepping.save(tmp_path / "apart.pt2", weights="per-rank")
    run_fresh(RANK, tmp_path)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for pair in pairs:
        optimizer.zero_grad()
        loss = model(*pair)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    want = {"losses": torch.stack(losses), **{name: p.detach() for name, p in model.named_parameters()}}
    for rank in range(2):
        found = load_file(tmp_path / f"out{rank}.safetensors")
        for run in ("live", "outside", "insideinductor", "insideeager", "aparteager"):
            for name, value in want.items():
                torch.testing.assert_close(
                    found[f"{run}.{name}"], value, rtol=1e-9, atol=1e-9, msg=lambda text, r=run, n=name: f"{r} {n}: {text}"
                )
