"""Importing this module does what every rank would do first: it imports torch, the compiler and all of fxshard, and trains a small model.

The ranks are forks of one server that has imported it, so that late imports of torch and its check of the C++ compiler happen once.
It leaves no thread, which a fork would not have, and nothing else by which a test could tell the process from a fresh one. Ranks never
collect or traverse the objects made here.
"""

from __future__ import annotations

import gc
from importlib import import_module

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import fxshard
from fxshard.solver import warm_up
from tests.rare_collections import collect_rarely

MODULES = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export",
    "fxshard.api",
    "fxshard.runtime.backend.backend",
    "fxshard.runtime.exported",
    "transformers.models.llama.modeling_llama",
)


def train_once() -> None:
    """One training step with Inductor and one under ``torch.compile``, as the first of two ranks of a fake group."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.ones(4, 8)
        with inductor.patch(compile_threads=1):
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
            fxshard.parallelize(model, (x,), mesh, pins={"0.weight": "S(0)"}, timeout=60.0)
            model(x).sum().backward()
        options = {"mesh": mesh, "compiler": "eager", "timeout": 60.0}
        torch.compile(nn.Linear(8, 8), backend="fxshard", options=options)(x).sum().backward()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
        counters.clear()


torch.set_num_threads(1)
collect_rarely()
tqdm.monitor_interval, interval = 0, tqdm.monitor_interval  # its monitor is a thread
for name in MODULES:
    import_module(name)
warm_up()
if not torch.backends.cuda.is_built():  # a backward of a CUDA build starts threads, without a GPU too, after which autograd refuses forks
    train_once()
tqdm.monitor_interval = interval
gc.collect()
gc.freeze()
