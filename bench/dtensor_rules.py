"""``python -m bench.dtensor_rules``: operators that fail in eager DTensor, through fxshard's backend, on two gloo ranks.

Every entry of torch's op_db, with its first sample, tensors sharded by rows where that is even. Those that fail in eager DTensor run again
under ``torch.compile(backend="fxshard")``, which brings rules to DTensor. Their results are held against one device.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from fxshard.runtime.groups.local_ranks import wait_for

RANKS, HOURS = 2, 1
ORDER = ("right", "no sample", "wrong")
"""Outcomes from good to bad; an error is worse than all of them."""
OPTIONS = {"compiler": "eager", "timeout": 30.0}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dtensor_rules", description=__doc__)
    parser.add_argument("--entries", default="*", help="only entries whose full name this glob matches")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        rank_main(chosen.rank, chosen.store, chosen.entries)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "bench.dtensor_rules", "--entries", chosen.entries]
        command += ["--store", str(Path(folder, "store"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
        wait_for(ranks, HOURS * 3600, "ask fewer --entries")
        return 0


def rank_main(rank: int, store: str, entries: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    chosen = [entry for entry in op_db if fnmatch.fnmatch(entry.full_name, entries)]
    outcomes = {entry.full_name: agreed(eager(entry, mesh)) for entry in chosen}
    failing = [entry for entry in chosen if outcomes[entry.full_name] not in ORDER]

    import fxshard.runtime.backend.backend  # noqa: F401  (torch.compile does this when it looks up the backend)

    rows = [(entry.full_name, agreed(compiled(entry, mesh)), outcomes[entry.full_name]) for entry in failing]
    if rank == 0:
        print(tabulate(rows, headers=("entry", "compiled by fxshard", "eager DTensor without fxshard"), maxcolwidths=[None, 80, 60]))
        counts = Counter(outcome if outcome in ("right", "wrong") else "refused or failed" for _, outcome, _ in rows)
        asked = len(chosen) - sum(outcome == "no sample" for outcome in outcomes.values())
        print(f"{asked} entries asked, {len(failing)} fail in eager DTensor; of these, compiled by fxshard: {dict(counts)}")
        print("other numbers in eager DTensor:", ", ".join(name for name, outcome in outcomes.items() if outcome == "wrong"))
    dist.barrier()


def agreed(outcome: str) -> str:
    """The worst outcome of all ranks, so that all go on with the same entries."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, outcome)
    return max(found, key=lambda one: ORDER.index(one) if one in ORDER else len(ORDER))


def eager(entry: Any, mesh: DeviceMesh) -> str:
    return outcome_of(entry, mesh, entry.op)


def compiled(entry: Any, mesh: DeviceMesh) -> str:
    torch.compiler.reset()

    def call(*args: Any, **kwargs: Any) -> Any:
        return entry.op(*args, **kwargs)

    return outcome_of(entry, mesh, torch.compile(call, backend="fxshard", fullgraph=True, options=OPTIONS))


def outcome_of(entry: Any, mesh: DeviceMesh, call: Any) -> str:
    """``right``, ``wrong``, ``no sample``, or the first line of what was raised."""
    dtype = next((d for d in (torch.float64, torch.float32, torch.int64, torch.complex128) if d in entry.supported_dtypes("cpu")), None)
    torch.manual_seed(0)
    sample = dtype and next(iter(entry.sample_inputs("cpu", dtype)), None)
    if sample is None:
        return "no sample"
    arguments = ((sample.input, *sample.args), sample.kwargs)
    plain = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, arguments)  # some entries write to them
    try:
        want = entry.op(*plain[0], **plain[1])
    except Exception:
        return "no sample"  # one device cannot do it
    try:
        args, kwargs = tree_map(lambda x: sharded(x, mesh), arguments)
        have = call(*args, **kwargs)
        return "right" if equal(have, want) else "wrong"
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def sharded(x: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    even = x.dim() > 0 and x.shape[0] > 0 and x.shape[0] % RANKS == 0
    return distribute_tensor(x.detach(), mesh, [Shard(0) if even else Replicate()])


def equal(have: Any, want: Any) -> bool:
    mine, theirs = (tree_leaves(value) for value in (have, want))
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in mine]
    try:
        torch.testing.assert_close(whole, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
