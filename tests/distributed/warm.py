"""What every rank would do first: importing this imports torch, the compiler and all of fxshard, and has the solver's loops loaded.

The processes of ranks are forks of one server that has imported this. Nothing here starts a thread, which a fork would not have.
"""

from __future__ import annotations

from importlib import import_module

import torch
from tqdm import tqdm

from fxshard.solver import warm_up

MODULES = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export",
    "fxshard.api",
    "fxshard.runtime.backend.backend",
    "fxshard.runtime.exported",
)

torch.set_num_threads(1)
tqdm.monitor_interval, interval = 0, tqdm.monitor_interval  # its monitor is a thread
for name in MODULES:
    import_module(name)
warm_up()
tqdm.monitor_interval = interval
