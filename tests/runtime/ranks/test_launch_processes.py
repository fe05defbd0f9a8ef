"""Agreement among real processes over gloo: all cases that three ranks survive, and a planner that dies with the store."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard.errors import ConstraintError, FxshardError, OptionError
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.ranks.launch import checksum, compare, mesh_ranks, share_plan
from tests.distributed.scenarios import forks
from tests.plans.small_plans import small_plan

pytestmark = pytest.mark.distributed
START = 200.0  # seconds for `import torch` on busy cores and a test
SOON = 8.0  # seconds from a failure to its error on all ranks


def start(body: Any, world: int, folder: Path, expected: set[int] | None = None) -> dict[int, Any]:
    """Runs ``body(rank, folder)`` on ``world`` processes with a default gloo group. Returns the results of the ``expected`` ranks."""
    context = forks()
    processes = [context.Process(target=_process, args=(body, rank, world, str(folder)), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    until = time.monotonic() + START
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
    assert not hanging, f"ranks {hanging} hang"
    return {rank: torch.load(folder / f"{rank}.pt") for rank in sorted(expected if expected is not None else range(world))}


def _process(body: Any, rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port = Path(folder) / "port"
    if store is not None:
        port.with_suffix(".new").write_text(str(store.port))
        os.replace(port.with_suffix(".new"), port)
    wait_for(port)
    store = store or dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    torch.save(body(rank, folder), Path(folder) / f"{rank}.pt")


def wait_for(path: Path) -> None:
    until = time.monotonic() + START
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def caught(body: Any) -> tuple[str, str, float]:
    """Type, text and seconds of the error that ``body`` raises."""
    started = time.monotonic()
    try:
        body()
    except FxshardError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def _failing() -> ShardingPlan:
    raise ConstraintError("the pin 'wq' matches nothing")


def _through_everything(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    pair = DeviceMesh("cpu", [2, 0])
    found: dict[str, Any] = {"mesh": mesh_ranks(mesh), "pair": mesh_ranks(pair)}
    found["plan"] = share_plan(small_plan if rank == 0 else _failing, ranks=mesh_ranks(mesh), timeout=SOON).to_json()
    found["raises"] = caught(lambda: share_plan(_failing, timeout=600.0))
    batch = torch.full((2, 3), float(rank == 1), dtype=torch.bfloat16)
    found["checksum"] = caught(lambda: compare({"value: args[0]": checksum(batch)}, timeout=600.0))
    found["stranger"] = caught(lambda: compare({}, ranks=(0, 1) if rank == 2 else (1, 3)))
    if rank != 1:
        found["sub"] = share_plan(small_plan, ranks=mesh_ranks(pair), timeout=SOON).to_json()
        found["missing"] = caught(lambda: compare({"plan": "a"}, timeout=1.0))
        (Path(folder) / "given_up").touch()
    else:
        wait_for(Path(folder) / "given_up")
        found["missing"] = caught(lambda: compare({"plan": "a"}, timeout=600.0))
    compare({"rng_seed": "7"}, timeout=SOON)
    dist.barrier()
    return found


def test_three_ranks_over_gloo(tmp_path: Path) -> None:
    found = start(_through_everything, 3, tmp_path)
    plan = small_plan().to_json()
    for rank, one in found.items():
        assert (one["mesh"], one["pair"], one["plan"]) == ((0, 1, 2), (0, 2), plan)
        kind, text, seconds = one["raises"]
        assert (kind, seconds < SOON) == ("ConstraintError" if rank == 0 else "RunError", True), text
        assert "the pin 'wq' matches nothing" in text and (rank == 0 or "rank 0 could not" in text)
        kind, text, seconds = one["checksum"]
        assert (kind, seconds < SOON) == ("RunError", True)
        assert "differ in the value of args[0]: ranks 0, 2: " in text and "; rank 1: " in text and "local_batch" in text
        assert one["stranger"][0] == ("RunError" if rank == 2 else OptionError.__name__)
        kind, text, seconds = one["missing"]
        assert (kind, seconds < SOON) == ("RunError", True)
        assert "rank 1 did not come to compare what they run within 1 s; there: ranks 0, 2" in text
    assert found[0]["sub"] == found[2]["sub"] == plan


def _planner_dies(rank: int, folder: str) -> Any:
    def die() -> ShardingPlan:
        time.sleep(0.5)
        os._exit(3)

    return caught(lambda: share_plan(die, timeout=600.0))


def test_if_the_planner_dies_with_the_store_the_others_raise_at_once(tmp_path: Path) -> None:
    kind, text, seconds = start(_planner_dies, 2, tmp_path, expected={1})[1]
    assert (kind, seconds < SOON) == ("RunError", True)
    assert "rank 1 lost the process group's store when it was about to share the plan" in text and "rank 0" in text


def _fails_and_exits(rank: int, folder: str) -> Any:
    """Rank 0 fails after rank 1 has come. It would not wait for a rank that has not come, and the store would end with it."""
    if rank:
        return caught(lambda: share_plan(_failing, timeout=600.0))

    def late() -> ShardingPlan:
        dist.group.WORLD.get_group_store().wait(["fxshard/0,1/1/from/1"], timedelta(seconds=START))
        return _failing()

    return caught(lambda: share_plan(late, timeout=600.0))


def test_a_planner_that_fails_stays_until_the_others_know_why(tmp_path: Path) -> None:
    found = start(_fails_and_exits, 2, tmp_path)
    assert all("the pin 'wq' matches nothing" in text for _, text, _ in found.values()), found
