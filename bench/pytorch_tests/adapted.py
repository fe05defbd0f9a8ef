"""Adapts torch's test helpers in this process: tests of several GPUs run on the CPU, and compiled functions go where ``way`` says."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor

WAYS = ("torch", "fxshard")


def adapt(way: str, compiler: str) -> None:
    """Before the file is imported: no test is skipped for want of GPUs; ``way`` "fxshard" replaces the backends that it names."""
    from torch.testing._internal import common_distributed, common_utils, inductor_utils

    given, sys.argv[1:] = sys.argv[1:], []
    common_utils.parse_cmd_line_args()
    sys.argv[1:] = given
    common_distributed.skip_if_lt_x_gpu = _not_skipped
    torch.distributed.tensor.randn = _randn
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel
    fsdp.__init__ = partialmethod(_fsdp_on_cpu, fsdp.__init__)
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_processes
    inductor_utils.HAS_GPU = True
    if way == "fxshard":
        _send_to_fxshard(compiler)


def load(file: str) -> ModuleType:
    """The test file as a module."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _not_skipped(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _fsdp_on_cpu(wrapper: Any, init: Any, module: Any, *args: Any, device_id: Any = "cpu", **kwargs: Any) -> None:
    """FSDP, which looks for an accelerator unless it is given a device."""
    init(wrapper, module, *args, device_id=torch.device(device_id), **kwargs)


def _randn(*size: int, device_mesh: Any, placements: Any) -> Any:
    """``torch.distributed.tensor.randn``, which needs an accelerator's generator."""
    return torch.distributed.tensor.distribute_tensor(torch.randn(size), device_mesh, placements)


def _fork_processes(case: Any) -> None:
    """The processes of a test with several ranks begin as copies of this one, with all that was imported and adapted here."""
    case._start_processes(multiprocessing.get_context("fork").Process)


def _send_to_fxshard(compiler: str) -> None:
    from fxshard.runtime.backend.backend import fxshard

    compiled = torch.compile
    ours = partial(fxshard, options={"compiler": compiler})

    def compile_with_fxshard(*args: Any, backend: Any = "inductor", **kwargs: Any) -> Any:
        return compiled(*args, backend=_replaced(backend, ours), **kwargs)

    torch.compile = compile_with_fxshard


def _replaced(backend: Any, ours: Callable[..., Any]) -> Any:
    """fxshard in place of ``backend``; one that counts or records graphs still does."""
    from torch._dynamo import testing

    if isinstance(backend, testing.CompileCounterWithBackend):
        backend.backend = ours
        return backend
    if isinstance(backend, testing.CompileCounter | testing.EagerAndRecordGraphs):
        return partial(_recorded, backend, ours)
    return ours


def _recorded(recorder: Any, ours: Any, graph: Any, inputs: Any) -> Any:
    recorder(graph, inputs)
    return ours(graph, inputs)


def replace_fake_groups(rank: int, ranks: int, store: str) -> None:
    """Makes each fake process group of ``ranks`` ranks that a test starts a gloo group, of which this process is ``rank``.

    ``store``: the beginning of the names of the files by which the ranks find each other; another one for each test.
    """
    import torch.distributed as dist

    count = 0

    def start(backend: Any = None, **kwargs: Any) -> None:
        nonlocal count
        if backend != "fake" or kwargs.get("rank") != 0 or kwargs.get("world_size") != ranks:
            started(backend, **kwargs)
            return
        count += 1
        started("gloo", store=dist.FileStore(f"{store}{count}", ranks), rank=rank, world_size=ranks)

    started = getattr(dist.init_process_group, "replaced", dist.init_process_group)
    start.replaced = started
    dist.init_process_group = start
