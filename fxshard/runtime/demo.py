"""The demo: trains a small Llama on real text, in two real processes, compiled, with the plan that the solver finds."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from fxshard import progress as terminal
from fxshard.errors import RunError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_text import view_of
from fxshard.runtime.groups.local_ranks import wait_for
from fxshard.runtime.module.module import ShardedForward, parallelize
from fxshard.runtime.ranks.record import in_order_of_issue, record_collectives
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.views.screen import merged_text, proof_text

T = TypeVar("T")
RANKS, STEPS, BATCH, LENGTH = 2, 20, 8, 128
SIZES: dict[str, Any] = {"dim": 128, "heads": 8, "kv_heads": 4, "ffn": 384, "layers": 2}
RATE = 0.1
SIMULATED_STEPS = 3
RESULT = "result.json"
"""The file in which the first rank leaves the losses."""
SECONDS = 240
"""Time after which the demo kills the ranks and fails."""


def main(as_json: bool = False) -> None:
    """Runs the demo; raises RunError when a rank fails. ``as_json``: print the losses as JSON, all else on a terminal only."""
    with _elsewhere() if as_json else contextlib.nullcontext() as prose:
        text = corpus()
        print(f"text: {len(text):,} bytes of Python's standard library, {BATCH} x {LENGTH} bytes a step")
        print(f"\n== training on {RANKS} gloo ranks, compiled by Inductor, compared with one device ==", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = {"ranks": _run_ranks(Path(folder), prose)}
        print("\n== the same on a simulated 2x2 mesh ==", flush=True)
        found["simulated"] = simulated(text)
    if as_json:
        print(json.dumps(found, indent=1))


@contextlib.contextmanager
def _elsewhere() -> Iterator[int]:
    """What is printed goes to stderr if that is a terminal, else nowhere; yields the file descriptor of that, for other processes."""
    with open(os.devnull, "w") as nowhere:
        file = sys.stderr if sys.stderr.isatty() else nowhere
        with contextlib.redirect_stdout(file):
            yield file.fileno()


def corpus(limit: int = 2_000_000) -> torch.Tensor:
    """Python's own standard-library sources as bytes, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def batches(text: torch.Tensor, steps: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, targets), both [BATCH, LENGTH], the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw)
        rows = torch.stack([text[int(s) : int(s) + LENGTH + 1] for s in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def progress(steps: Iterable[T], total: int) -> Iterator[T]:
    """``steps`` with a progress bar; if output does not go to a terminal, prints one line at the end instead."""
    start = time.perf_counter()
    with tqdm(steps, total=total, desc="steps", disable=None) as bar:
        silent = bar.disable
        yield from bar
    if silent:
        print(f"{total} steps in {time.perf_counter() - start:.1f} s", flush=True)


def llama(**changes: Any) -> nn.Module:
    """The model of ``examples/llama.py``, with the same weights in every process."""
    torch.manual_seed(0)
    return _example("llama").Llama.small(**{**SIZES, **changes})


def _example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    if not path.exists():
        raise RunError(f"the demo's model is missing: {path}", remedy="run the demo from a clone of fxshard, for example with make demo")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _run_ranks(folder: Path, output: int | None) -> dict[str, Any]:
    """Starts the ranks as processes of their own, each this file with its rank in the environment; returns the losses. ``output``: the file
    descriptor that they print to."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "FXSHARD_DEMO_STORE": str(folder / "store")}
    ranks = [
        subprocess.Popen([sys.executable, "-m", "fxshard.runtime.demo"], env={**environment, "RANK": str(r)}, stdout=output)
        for r in range(RANKS)
    ]
    wait_for(ranks, SECONDS, "run the demo again with FXSHARD_DUMP=some/folder to see every stage")
    return json.loads((folder / RESULT).read_text())


def rank_main() -> None:
    """One rank of the demo."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["FXSHARD_DEMO_STORE"], RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    text = corpus()
    tokens, targets = next(iter(batches(text, 1)))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    start = time.perf_counter()
    model = parallelize(llama(), (tokens, targets), mesh)
    if rank == 0:
        print(_program(model).plan)
        print(f"planned and compiled in {time.perf_counter() - start:.1f} s", flush=True)
    losses, issued = _train(model, text, rank)
    if rank == 0:
        _report(losses, _alone(text), issued, model)
    dist.barrier()
    dist.destroy_process_group()


def _program(model: nn.Module) -> Any:
    forward = model.forward
    assert isinstance(forward, ShardedForward)
    return forward.programs[0]


def _train(model: nn.Module, text: torch.Tensor, rank: int) -> tuple[list[float], list[Any]]:
    """The losses of all steps, and the collectives that the last step issued."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    last: list[Any] = []
    steps = batches(text, STEPS)
    for tokens, targets in steps if rank else progress(steps, STEPS):
        with record_collectives() as issued:
            loss = model(tokens, targets)
            loss.backward()
        last = issued
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, last


def _alone(text: torch.Tensor) -> list[float]:
    """The same training on one device, eager."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for tokens, targets in batches(text, STEPS):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _report(losses: list[float], alone: list[float], issued: list[Any], model: nn.Module) -> None:
    program = _program(model)
    issued_so = in_order_of_issue(program, dict.fromkeys(program.mesh.axis_names, "gloo"))
    predicted = Counter((c.kind, c.axis) for c in issued_so)
    sent = Counter[tuple[str, str]]()
    for c in issued_so:
        sent[c.kind, c.axis] += c.bytes
    ran = Counter((c.kind, c.axis) for c in issued)
    rows = [(kind, axis, predicted[kind, axis], ran[kind, axis], sent[kind, axis]) for kind, axis in sorted({*predicted, *ran})]
    merged = merged_text(view_of(program.plan), [c.serves for c in program.collectives])
    print(f"\ncollectives: {merged}" if merged else "")
    print(tabulate(rows, headers=("collective", "axis", "predicted", "issued", "bytes sent per rank")))
    steps = [i for i in range(STEPS) if i % 5 == 0 or i == STEPS - 1]
    print("\n" + tabulate([(i, losses[i], alone[i]) for i in steps], headers=("step", "loss, sharded", "loss, one device"), floatfmt=".6f"))
    worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"\ngreatest difference of the losses: {worst:.2e}", flush=True)
    told = {"losses": losses, "one device": alone, "difference": worst}
    (Path(os.environ["FXSHARD_DEMO_STORE"]).parent / RESULT).write_text(json.dumps(told))
    _judge(predicted, ran, worst, 1e-4)


def simulated(text: torch.Tensor) -> dict[str, Any]:
    """A few training steps on a 2x2 mesh in this process, in float64, compared with one device."""
    model, alone = llama().double(), llama().double()
    tokens, targets = next(iter(batches(text, 1)))
    mesh = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    graph = trace(model, (tokens, targets))
    plan = plan_graph(graph, mesh, Request(input_layouts="RR", output_layouts="RR"))
    program = lower_plan(graph, plan)
    rows, worst = [], 0.0
    for step, (tokens, targets) in enumerate(progress(batches(text, SIMULATED_STEPS), SIMULATED_STEPS)):
        result = simulate_program(program, program_values(program, model, (tokens, targets)))
        loss = alone(tokens, targets)
        loss.backward()
        worst = max(worst, *(float((result.grads[n] - p.grad).norm() / p.grad.norm()) for n, p in alone.named_parameters()))
        rows.append((step, result.outputs.item(), loss.item()))
        _descend(model, result.grads)
        _descend(alone, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
        alone.zero_grad()
    counted = Counter((c.kind, c.axis) for c in result.collectives)
    wanted = Counter((c.kind, c.axis) for c in program.collectives)
    kinds = [(kind, axis, wanted[kind, axis], counted[kind, axis]) for kind, axis in sorted({*wanted, *counted})]
    print("\n" + tabulate(kinds, headers=("collective", "axis", "predicted", "issued")))
    print(f"objective {proof_text(view_of(plan))}")
    print("\n" + tabulate(rows, headers=("step", "loss, 2x2", "loss, one device"), floatfmt=".12f"))
    print(f"\ngreatest difference of the losses: {max(abs(a - b) for _, a, b in rows):.2e}")
    print(f"greatest relative difference of a gradient: {worst:.1e}")
    difference = max(abs(a - b) for _, a, b in rows)
    _judge(wanted, counted, difference, 1e-9)
    return {"losses": [a for _, a, _ in rows], "one device": [b for *_, b in rows], "difference": difference, "gradients": worst}


def _judge(predicted: Mapping[Any, int], issued: Mapping[Any, int], difference: float, allowed: float) -> None:
    """Raises RunError unless the predicted collectives ran and the losses are those of one device."""
    if predicted != issued:
        raise RunError(f"the collectives differ from the prediction: {dict(issued)}, not {dict(predicted)}", remedy="please report it")
    if not difference <= allowed:
        raise RunError(f"the losses differ from those of one device by {difference:.2e}", remedy="please report it")


def _descend(model: nn.Module, grads: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= RATE * grads[name]


if __name__ == "__main__":
    with terminal.progress("fxshard demo"):
        rank_main()
