"""Once a program is bound, the process keeps freed memory for the next step: measured by its page faults."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph import bind

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    "glibc" not in platform.libc_ver() or (HUGE.exists() and "[always]" in HUGE.read_text()),
    reason="needs glibc's malloc options, and small pages to count faults",
)

SCRIPT = """
import ctypes, resource, sys
from fxshard.runtime.groups import host_memory

libc, size = ctypes.CDLL(None), 12 << 20
libc.malloc.restype = ctypes.c_void_p

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        buffers = [libc.malloc(ctypes.c_size_t(size)) for _ in range(5)]
        for buffer in buffers:
            libc.memset(ctypes.c_void_p(buffer), 1, ctypes.c_size_t(size))
        for buffer in buffers:
            libc.free(ctypes.c_void_p(buffer))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages()
loose = pages()
print(host_memory.keep_freed(int(sys.argv[1])), loose)
pages()
print(pages())
"""


def run(size: int, **environment: str) -> tuple[bool, int, int]:
    """(whether the option was set, page faults of 4 rounds of 60 MiB before, and after)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(size)], env={**kept, **environment}, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    said, before, after = ended.stdout.split()
    return said == "True", int(before), int(after)


@pytest.mark.parametrize("size", [416, 61 << 20])
def test_the_next_step_reuses_freed_memory(size: int) -> None:
    """Also after a small program: it must not make the process return other memory sooner."""
    took, before, after = run(size)
    pages = 4 * (60 << 20) // resource.getpagesize()
    assert took
    assert before > pages / 2, "without the option each round must fault"
    assert after < pages / 20


def test_malloc_options_of_the_user_stay() -> None:
    took, before, after = run(61 << 20, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not took and after > before / 2 > 0


def test_a_program_on_the_cpu_keeps_what_its_plan_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(bind.host_memory, "keep_freed", asked.append)
    graph = trace(nn.Linear(8, 4), (torch.ones(2, 8),))
    plan = plan_graph(graph, Mesh({"a": 1}), Request(cache=False))
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        bind.bind(lower_plan(graph, plan), init_device_mesh("cpu", (1,), mesh_dim_names=("a",)))
    finally:
        dist.destroy_process_group()
    assert asked == [sum(plan.memory.values())] and asked[0] >= (8 * 4 + 4) * 4 * 2, "parameters and their gradients at least"
