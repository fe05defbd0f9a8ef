"""DTensor's side: distributes the inputs, calls the operator on them and gathers the results.

All ranks run in this process, first in LocalTensorMode, which is fast but has faults of its own. A combination that fails there runs again
with one thread per rank over torch's threaded process group, and that result counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from bench.operators.entries import Sample
from bench.operators.truth import Truth, difference, first_line, flat, gradients, scale_of
from bench.operators.verdict import Finding

NO_STRATEGY = "does not have a sharding strategy registered"
PATIENCE = 20
"""Time limit in seconds for the threads of one combination."""


Placements = Sequence[int | None]


class Theirs:
    """One sample on DTensor."""

    def __init__(self, sample: Sample, truth: Truth, grad: bool) -> None:
        self.sample, self.truth, self.grad = sample, truth, grad
        self.checked: dict[str, Finding] = {}

    def run(self, placements: tuple[int | None, ...]) -> Finding:
        """Runs one combination. A failure that threads have confirmed once for this sample is not run in threads again."""
        found = self._judged(lambda: _in_one(self.sample, placements, self.truth, self.grad))
        if found.kind in ("right", "no strategy"):
            return found
        cause = found.kind + found.detail[:40]
        if cause not in self.checked:
            again = self._judged(lambda: _in_threads(self.sample, placements, self.truth, self.grad))
            if again.kind == "right":
                return again
            self.checked[cause] = again
        return self.checked[cause]

    def _judged(self, run: Any) -> Finding:
        try:
            ranks = run()
        except Exception as error:
            kind = "no strategy" if NO_STRATEGY in str(error) else "error"
            return Finding(kind, f"{type(error).__name__}: {first_line(error)}")
        for outputs, grads in ranks:
            said = difference(outputs, self.truth.outputs, not self.truth.random)
            if said is None and self.grad and not self.truth.random:
                pairs = [(h, w) for h, w in zip(grads, self.truth.grads, strict=True) if w is not None]
                scale = scale_of([w for _, w in pairs])
                said = next((f"gradient {i}: {s}" for i, (h, w) in enumerate(pairs) if (s := difference([h], [w], scale=scale))), None)
            if said is not None:
                return Finding("wrong", said)
        return Finding("right")


def step(sample: Sample, placements: Placements, mesh: DeviceMesh, tangents: Sequence[Any], grad: bool) -> tuple[list[Any], list[Any]]:
    """One rank's work: distribute, call, gather; with ``grad`` for the gradients too."""
    args, kwargs = sample.fresh(grad)
    left = iter(placements)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _distributed(t, next(left), mesh), (args, kwargs))
    with torch.set_grad_enabled(grad):
        outputs = flat(pytree.tree_map_only(DTensor, lambda t: t.full_tensor(), sample.function(*args, **kwargs)))
    if not grad:
        return outputs, []
    inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    grads = gradients(outputs, tangents, inputs)
    return outputs, [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def _distributed(tensor: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> DTensor:
    placement = Replicate() if dim is None else Shard(dim)
    made = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=None)
    return made.requires_grad_(tensor.requires_grad)


def _in_one(sample: Sample, placements: Placements, truth: Truth, grad: bool) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    mesh = _mesh(sample.world)
    torch.manual_seed(sample.seed)
    with LocalTensorMode(frozenset(range(sample.world))):
        outputs, grads = step(sample, placements, mesh, truth.tangents, grad)

    def on_rank(value: Any, rank: int) -> Any:
        return value._local_tensors[rank] if isinstance(value, LocalTensor) else value

    return [([on_rank(v, r) for v in outputs], [on_rank(v, r) for v in grads]) for r in range(sample.world)]


@cache
def _mesh(world: int) -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return DeviceMesh("cpu", torch.arange(world))


def _in_threads(sample: Sample, placements: Placements, truth: Truth, grad: bool) -> list[tuple[list[Any], list[Any]]]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()
    results: dict[int, tuple[list[Any], list[Any]]] = {}
    errors: dict[int, BaseException] = {}

    def rank_body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=sample.world, store=store)
            mesh = DeviceMesh("cpu", torch.arange(sample.world))
            torch.manual_seed(sample.seed)
            results[rank] = step(sample, placements, mesh, truth.tangents, grad)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=rank_body, args=(r,), daemon=True) for r in range(sample.world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    own = [e for e in errors.values() if isinstance(e, Exception)]
    if errors:
        raise own[0] if own else RuntimeError("a rank left the collective")
    if len(results) < sample.world:
        raise RuntimeError("ranks wait for each other")
    return [results[r] for r in range(sample.world)]
