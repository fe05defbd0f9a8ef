"""Real processes over gloo for tests: they start once and run many scenarios, each with a result of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Scenario = Callable[[], Any]
"""Runs on every rank, in a process with a default gloo group. It fails if it raises."""


def forks() -> Any:
    """The multiprocessing context whose processes are forks of one server, which has imported torch and trained a model (``warm``).

    A test process has one such server, with the imports of the test that started it: all tests that start ranks start it here.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.warm"])
    forkserver.ensure_running()
    return context


def run_scenarios(scenarios: Mapping[str, Scenario], world: int, folder: Path, seconds: float = 300.0) -> dict[str, str]:
    """Runs all ``scenarios``, in order, on ``world`` processes. Returns for each the traceback of the first rank that failed, or "".

    Scenarios are module-level functions. If a scenario fails on some ranks only, later ones may fail because of it.
    """
    context = forks()
    arguments = [(dict(scenarios), rank, world, str(folder)) for rank in range(world)]
    processes = [context.Process(target=_process, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    return {name: _said(name, [process.exitcode for process in processes], folder) for name in scenarios}


def on_ranks(world: int, *scenarios: Scenario) -> tuple[Any, Any]:
    """Makes the fixture and the test of a module: ``found, test_four_ranks = on_ranks(4, ...)``. Each scenario is one test case.

    The processes run only what is selected (``-k``, ``-m``).
    """
    return cases_on_ranks(world, {scenario.__name__: scenario for scenario in scenarios})


def cases_on_ranks(world: int, named: Mapping[str, Scenario], seconds: float = 300.0) -> tuple[Any, Any]:
    """As ``on_ranks``, for scenarios by their names. ``seconds``: the time for all of them."""

    @pytest.fixture(scope="module")
    def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        return run_scenarios(selected(named, request), world, tmp_path_factory.mktemp("ranks"), seconds)

    @pytest.mark.parametrize("name", named)
    def test_ranks(name: str, found: dict[str, str]) -> None:
        assert not found[name], found[name]

    return found, test_ranks


def selected(scenarios: Mapping[str, Scenario], request: pytest.FixtureRequest) -> dict[str, Scenario]:
    """The scenarios that a test of this module, which runs now, has as its parameter ``name``. ``request``: of a module's fixture."""
    items = [item for item in request.session.items if item.nodeid.partition("::")[0] == request.node.nodeid]
    wanted = {callspec.params.get("name") for item in items if (callspec := getattr(item, "callspec", None)) is not None}
    return {name: scenario for name, scenario in scenarios.items() if name in wanted}


def two_ranks(*scenarios: Scenario) -> tuple[Any, Any]:
    """``on_ranks`` with two."""
    return on_ranks(2, *scenarios)


def run_command(body: Callable[[], int], folder: Path, seconds: float = 300.0) -> tuple[int | None, str, str]:
    """Runs ``body`` in one process, without a group. Returns its exit code (None: it did not end), its stdout and its stderr."""
    process = forks().Process(target=_command, args=(body, str(folder)), daemon=True)
    process.start()
    process.join(seconds)
    code = process.exitcode
    process.kill()
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def _command(body: Callable[[], int], folder: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = body()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _said(name: str, exit_codes: Sequence[int | None], folder: Path) -> str:
    """What the ranks say of one scenario: first of all how a rank died, which the others can only suspect."""
    finished = {rank: folder / f"{name}.{rank}" for rank in range(len(exit_codes))}
    said = [_death(rank, exit_codes[rank], folder) for rank, path in finished.items() if not path.exists()]
    said += [f"rank {rank}: {path.read_text()}" for rank, path in finished.items() if path.exists() and path.read_text()]
    return "\n".join(said)


def _death(rank: int, exit_code: int | None, folder: Path) -> str:
    how = "still ran, or was stopped after its time" if exit_code is None else f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was ended by {signal.Signals(-exit_code).name}"
    stderr = folder / f"{rank}.stderr"
    return f"rank {rank} did not finish; it {how}\n{stderr.read_text()[-20_000:] if stderr.exists() else ''}"


def _process(scenarios: dict[str, Scenario], rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(Path(folder, f"{rank}.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # C++ says there why it ends a process
    faulthandler.enable(2)
    store = _store(rank, Path(folder))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for name, scenario in scenarios.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            scenario()
            said = ""
        except BaseException:
            said = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(said)
    store.add("done", 1)  # rank 0 holds the store: it stays until all have finished
    until = time.monotonic() + 30
    while rank == 0 and store.add("done", 0) < world and time.monotonic() < until:
        time.sleep(0.02)
    os._exit(0)


def _store(rank: int, folder: Path) -> Any:
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        os.replace(port.with_suffix(".new"), port)
        return store
    until = time.monotonic() + 60
    while not port.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, timedelta(seconds=60))
