"""One rank of a run that may be killed at any time: it continues from the last checkpoint."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.runtime import demo

DROPOUT, RATE = 0.1, 1e-3


@dataclass(frozen=True)
class Settings:
    """``every``: steps between checkpoints; ``small``: a model of two layers instead of the demo's."""

    ranks: int = 2
    steps: int = 500
    every: int = 5
    compiler: str = "inductor"
    small: bool = False


class Data:
    """Random batches of the text; its position in the text is state that a checkpoint saves."""

    def __init__(self, text: Tensor) -> None:
        self.text, self.draw = text, torch.Generator().manual_seed(0)

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(self.text) - demo.LENGTH - 1, (demo.BATCH,), generator=self.draw).tolist()
        rows = torch.stack([self.text[s : s + demo.LENGTH + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Tensor]:
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.draw.set_state(state["draw"])


class Small(nn.Module):
    """Predicts the next byte from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(256, 24), nn.Linear(24, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found = self.out(F.dropout(torch.tanh(self.table(tokens)), DROPOUT, self.training))
        return F.cross_entropy(found.flatten(0, 1), targets.flatten())


def model(small: bool) -> nn.Module:
    """The demo's Llama with dropout after each feed-forward, or the small model. Every process gets the same weights."""
    torch.manual_seed(0)
    if small:
        return Small()
    made = demo.llama()
    for layer in made.layers:
        layer.feed_forward = nn.Sequential(layer.feed_forward, nn.Dropout(DROPOUT))
    return made


def main(settings: Settings, folder: Path, rank: int, port: int, hold: bool = False) -> None:
    """Trains from the last checkpoint in ``folder``, if there is one, to the last step; the log has a line per step.

    ``hold``: wait for a pending kill after the last step, before saving.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks, timeout=timedelta(seconds=60))
    with open(log_of(folder, rank), "w", buffering=1) as log:
        train(settings, folder / "checkpoint", log, hold)
    dist.barrier()
    dist.destroy_process_group()


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def train(settings: Settings, path: Path, log: TextIO, hold: bool) -> None:
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("tp",))
    data, done = Data(demo.corpus(200_000)), 0
    example = next(Data(data.text))
    pins = {"out.weight": "S(0)", "table.weight": "S(1)"} if settings.small else None
    sharded = fxshard.parallelize(model(settings.small), example, mesh, compiler=settings.compiler, pins=pins)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=RATE)
    torch.manual_seed(1)
    if (path / "index.json").exists():
        kept = fxshard.load_checkpoint(path, sharded, optimizer)
        done = kept["step"]
        data.load_state_dict(kept["data"])
    for step in range(done + 1, settings.steps + 1):
        loss = sharded(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(f"step {step} loss {loss.item():.6f}\n")
        while hold and step == settings.steps:
            signal.pause()
        if step % settings.every == 0 or step == settings.steps:
            fxshard.save_checkpoint(path, sharded, optimizer, extra={"step": step, "data": data.state_dict()})
