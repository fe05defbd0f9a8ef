"""``fxshard calibrate``: measures the present machine or cluster, writes a hardware file, and reports how well it predicts.

Under torchrun its ranks measure together. Otherwise the command starts one process per rank of the mesh, each with the same command line.
On a single device without a mesh, no communication is measured and a preset gives the links.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.cost.fit import (
    CollectiveTime,
    collective_errors,
    drop_collective_curves,
    fit_device,
    fit_links,
    noisy_collectives,
    op_errors,
    rounded,
)
from fxshard.errors import OptionError, count_text
from fxshard.files import check_writable
from fxshard.mesh.hardware import HARDWARE, Hardware
from fxshard.mesh.hardware_file import save, write_hardware
from fxshard.mesh.mesh import Mesh, as_mesh, parse_mesh, preset_of_device
from fxshard.progress import progress
from fxshard.runtime.groups import gloo_threads
from fxshard.runtime.groups.local_ranks import wait_for
from fxshard.runtime.measure.calibration import Calibration, file_rows, report
from fxshard.runtime.measure.measure import EFFORTS, MIN_TIME, Clock, measure_collectives, measure_ops

STORE = "FXSHARD_CALIBRATE_STORE"
SECONDS = 1800
"""Seconds after which the started processes are killed."""


def main(mesh: str | None, output: str | None, device: str | None, quick: bool, as_json: bool = False) -> None:
    """Runs the command; raises OptionError, FileError, or RunError if a rank fails. ``as_json``: print the hardware, and all else on
    stderr."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("there is no CUDA device here", where="--device cuda", remedy="give --device cpu, or run where torch sees a GPU")
    if output:
        check_writable(output)
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    axes = _axes(mesh, ranks)
    if not ranks and axes.size > 1:
        start_ranks(axes, device, [*_arguments(axes, output, device, quick), *(["--json"] if as_json else [])])
        return
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        calibration = _calibrate_rank(axes, device, quick)
    if ranks and int(os.environ["RANK"]):
        return
    show(calibration, output, as_json)


def show(calibration: Calibration, output: str | None, as_json: bool) -> None:
    """Writes the file, and prints the report or, ``as_json``, the hardware."""
    if output:
        save(calibration.hardware, output, calibration.made, file_rows(calibration))
    if as_json:
        print(json.dumps(write_hardware(calibration.hardware), indent=1))
        return
    print(report(calibration))
    if output:
        print(f"\nwrote {output}: give it as hardware={output!r} to fxshard.Mesh, or as --hardware {output}")


def _axes(text: str | None, ranks: int) -> Mesh:
    if text is None:
        return Mesh({"ranks": ranks or 1})
    mesh = parse_mesh(text)
    if ranks not in (0, mesh.size):
        what = f"mesh {text!r} has {mesh.size} ranks, and {ranks} are running"
        raise OptionError(what, where="--mesh", remedy="start as many ranks as the mesh has, or give another mesh")
    return mesh


def _arguments(mesh: Mesh, output: str | None, device: str, quick: bool) -> list[str]:
    return ["calibrate", "--mesh", str(mesh), "--device", device, *(["-o", output] if output else []), *(["--quick"] if quick else [])]


def start_ranks(mesh: Mesh, device: str, arguments: Sequence[str]) -> None:
    """Runs this command once more for each rank, as torchrun would."""
    if device == "cuda" and torch.cuda.device_count() < mesh.size:
        what = f"mesh {mesh} has {mesh.size} ranks, and there are {torch.cuda.device_count()} CUDA devices here"
        raise OptionError(what, where="--mesh", remedy="give a smaller mesh, or start the ranks with torchrun on several machines")
    threads = str(max(1, (os.cpu_count() or 1) // mesh.size))
    with tempfile.TemporaryDirectory() as folder:
        shared = {"OMP_NUM_THREADS": threads, **os.environ, "WORLD_SIZE": str(mesh.size), STORE: str(Path(folder) / "store")}
        command = [sys.executable, "-m", "fxshard", *arguments]
        ranks = [subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(mesh.size)]
        wait_for(ranks, SECONDS, "--quick, or a smaller mesh, measures less")


def _calibrate_rank(mesh: Mesh, device: str, quick: bool) -> Calibration:
    """Measures together with the other ranks; all ranks compute the same result."""
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    if mesh.size > 1:
        _init_process_group(rank, mesh.size, device)
    try:
        clock = Clock(place, EFFORTS[device, quick])
        with progress(f"measuring operators on {_device_name(device)}, {count_text(mesh.size, 'rank')} at once"):
            launch, ops = measure_ops(clock)
        hardware = fit_device(_base_preset(device), ops, launch)
        if mesh.size == 1:
            return Calibration(rounded(hardware), _provenance(mesh, device, quick), tuple(op_errors(hardware, ops)))
        with progress(f"measuring collectives on {mesh}"):
            device_mesh = init_device_mesh(device, mesh.shape, mesh_dim_names=mesh.axis_names)
            gloo_threads.set_policy()
            times = measure_collectives(clock, device_mesh)
        for what in _noise_warnings(mesh, times):
            _print_on_first(rank, f"warning: {what}; is other work running here? Measure again, without --quick")
        hardware = rounded(fit_links(as_mesh(mesh, hardware), times))
        curves, links = (tuple(collective_errors(h, mesh, times)) for h in (hardware, drop_collective_curves(hardware)))
        return Calibration(hardware, _provenance(mesh, device, quick), tuple(op_errors(hardware, ops)), curves, links)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _noise_warnings(mesh: Mesh, times: Sequence[CollectiveTime]) -> list[str]:
    found = []
    if lost := sum(t.time <= MIN_TIME for t in times):
        found.append(f"{lost} of {len(times)} measurements of collectives are lost in noise: plans will wrongly count them as free")
    found += [f"{one} took no longer for more bytes: without a curve, link formulas price it" for one in noisy_collectives(mesh, times)]
    return found


def _init_process_group(rank: int, ranks: int, device: str) -> None:
    backend, wait = {"cpu": "gloo", "cuda": "nccl"}[device], timedelta(seconds=120)
    given: dict[str, Any] = {"device_id": torch.device(device, torch.cuda.current_device())} if device == "cuda" else {}
    if STORE in os.environ:
        given |= {"store": dist.FileStore(os.environ[STORE], ranks), "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=wait, **given)


def _base_preset(device: str) -> Hardware:
    """The preset for this kind of device, with this cluster's number of devices per node and their memory, without its architecture:
    curves are measured."""
    preset = HARDWARE[preset_of_device(device)]
    here, ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), int(os.environ.get("WORLD_SIZE", 0))
    if here < ranks and here:
        node = here
    else:
        node = torch.cuda.device_count() if device == "cuda" else max(preset.node_size, ranks)
    memory = torch.cuda.get_device_properties().total_memory if device == "cuda" else None
    return replace(preset, name=f"measured {_device_name(device)}", node_size=node, architecture="", memory=memory)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def _print_on_first(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


def _provenance(mesh: Mesh, device: str, quick: bool) -> dict[str, str]:
    """What was measured and how, for readers of the file."""
    threads = {} if device == "cuda" else {"threads": str(torch.get_num_threads())}
    how = {
        "mesh": str(mesh),
        "rounds": str(EFFORTS[device, quick].rounds),
        "torch": str(torch.__version__),
        "when": time.strftime("%Y-%m-%d"),
    }
    links = {"links": f"not measured, for want of a mesh: those of the preset {preset_of_device(device)}"} if mesh.size == 1 else {}
    return {"device": _device_name(device), "system": platform.system(), **threads, **how, **links}
