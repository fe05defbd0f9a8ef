"""Estimates of Inductor beside the prices here and the measurements: of collectives, analytic and profile-guided.

The analytic one is ``estimate_nccl_collective_runtime_impl`` of torch 2.13, which takes its constants from the GPU of the machine; here it
is told that of the row. The profile-guided one is given a trace with every other size of each group, ``fxshard calibrate --trace`` the
same file; both are asked for the sizes in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from torch._inductor import comm_analysis
from torch._inductor.fx_passes.profile_guided_estimation import ProfileData

from bench.published.collective_time import CALL, is_single_call
from bench.published.collective_time import predicted as price
from bench.published.rows import Collective
from fxshard.cost import collective_time
from fxshard.cost.collectives import sent_fraction
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.measure.from_files import calibrated

KINDS = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}
GENERATIONS = {"a100": "AMPERE", "h100": "HOPPER", "h200": "HOPPER", "b200": "BLACKWELL"}
ENOUGH = 5
"""Sizes of a group from which every other one is left."""


@dataclass(frozen=True)
class Estimates:
    """Of one collective, each over the measurement."""

    row: Collective
    ours: float
    theirs: float


def analytic(rows: Sequence[Collective]) -> list[Estimates]:
    """Our prices and Inductor's formulas."""
    return [Estimates(row, price(row) / row.measured, _formula(row) / row.measured) for row in rows]


def _formula(row: Collective) -> float:
    """Microseconds, with the host's part of a single call as in our prediction."""
    gpu = comm_analysis.NVIDIA_GPU_TYPE[GENERATIONS[row.device]]
    with mock.patch.object(comm_analysis, "get_gpu_type", lambda: gpu):
        found = comm_analysis.estimate_nccl_collective_runtime_impl(row.size, row.ranks, comm_analysis.NCCL_COLL[row.kind.upper()])
    return 1e3 * found + (CALL if is_single_call(row) else 0.0)


def guided(rows: Sequence[Collective]) -> Iterator[Estimates]:
    """Both from a trace with every other size, on the other sizes."""
    groups: dict[tuple[str, str, int, str], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.device, row.ranks, row.source), []).append(row)
    for (kind, device, ranks, _), found in groups.items():
        if len(found) < ENOUGH:
            continue
        ordered = sorted(found, key=lambda row: row.size)
        held = [row for k, row in enumerate(ordered) if k % 2 and row is not ordered[-1]]
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            path.write_text(json.dumps({"traceEvents": [_event(row) for row in ordered if row not in held]}))
            profile, mesh = ProfileData(), Mesh({"all": ranks}, calibrated([], [str(path)], device).hardware)
            profile.load(str(path))
        for row in held:
            theirs = profile.lookup_collective(KINDS[kind], tuple(range(ranks)), row.size // 4, "Float")
            ours = collective_time(kind, 0, round(row.size * sent_fraction(kind, ranks)), mesh)
            if theirs is not None:
                yield Estimates(row, ours / row.measured, 1e3 * theirs[0] / row.measured)


def _event(row: Collective) -> dict[str, object]:
    """A kernel of NCCL as a trace has it; float32."""
    part = row.size // 4 // row.ranks
    sizes = {"all_gather": (part, row.size // 4), "reduce_scatter": (row.size // 4, part)}.get(row.kind, (row.size // 4,) * 2)
    about = {"Collective name": KINDS[row.kind], "dtype": "Float", "Group size": row.ranks, "Process Group Name": "0"}
    about |= {"In msg nelems": sizes[0], "Out msg nelems": sizes[1], "Process Group Ranks": str(list(range(row.ranks)))}
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 0, "dur": row.measured, "args": about}
