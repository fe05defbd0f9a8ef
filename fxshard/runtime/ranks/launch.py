"""What ranks agree on before the first collective: one plan for all, and equal inputs and settings.

All communication uses the process group's store (see ``agreement``), with deadlines: a missing rank is named instead of being waited for
forever. A process that is alone exchanges nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.fakes import FakeTensor
from fxshard.errors import OptionError, RunError
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.ranks.agreement import TIMEOUT, Group, Meeting, agree, default_group, name_ranks, told_to_all

log = logging.getLogger("fxshard")
ABSENT = "(none)"
_GLOBAL = (
    "plain tensors are global values, the same on each rank; pass a rank's own batch with fxshard.local_batch(x, device_mesh, axis=...), "
    "with the axis over which batches are split"
)
# Causes before their consequences: the first differing field determines the remedy.
REMEDIES: Mapping[str, str] = {
    "fxshard": "install the same version of fxshard on all ranks",
    "torch": "install the same version of torch on all ranks",
    "hooks": "register the same hooks on all ranks: they take part in the program; put what only one rank should do inside the hook",
    "mesh": "build the same DeviceMesh on all ranks: axis names, sizes, and the ranks along them",
    "shape": _GLOBAL,
    "rule": "register the same rules on all ranks (fxshard.register_rule): import the modules that do so on each",
    "graph": "build the same model on all ranks, with the same settings and in the same mode (train or eval); numbers that it reads are "
    "part of the graph, and must not be the rank's own (get_local_rank(), the size of a shard)",
    "weights": "call torch.manual_seed with the same seed on all ranks before building the model, or load one checkpoint on all of them",
    "plan": "pass the same plan on all ranks, or none: then rank 0 plans for all",
    "program": "pass the same options on all ranks, and load the same file",
    "value": _GLOBAL,
    "rng_seed": "call torch.manual_seed with the same seed on all ranks",
}
_OTHERWISE = "make it the same on all ranks"
MOST = 4
"""Maximum number of further differences that an error lists."""


def versions() -> dict[str, str]:
    """Fields of ``compare``: package versions, which must be equal on all ranks."""
    return {"fxshard": importlib.metadata.version("fxshard"), "torch": str(torch.__version__)}


def mesh_ranks(device_mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks in ``device_mesh``, sorted: the ``ranks`` of the calls below."""
    return tuple(sorted(int(rank) for rank in device_mesh.mesh.flatten().tolist()))


def leads(device_mesh: DeviceMesh) -> bool:
    """Whether this process is the lowest rank of ``device_mesh``, or alone."""
    return not dist.is_initialized() or dist.get_rank() == mesh_ranks(device_mesh)[0]


def leader_folder(chosen: str | Path | None, device_mesh: DeviceMesh, name: str) -> Path | Literal[False] | None:
    """The folder ``name`` in the chosen one (or FXSHARD_DUMP) on the lowest rank, False on the others; None if none is chosen."""
    chosen = chosen or os.environ.get("FXSHARD_DUMP")
    if not chosen:
        return None
    return Path(chosen) / name if leads(device_mesh) else False


def announce(device_mesh: DeviceMesh, level: int, text: str, *args: Any) -> None:
    """Logs on the lowest rank of ``device_mesh`` only, on behalf of all."""
    if leads(device_mesh):
        log.log(level, text, *args)


SAME = "the same"


def share_plan(
    make_plan: Callable[[], ShardingPlan],
    *,
    ranks: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    key: str = "",
    group: Group | None = None,
) -> ShardingPlan:
    """Makes a plan on the lowest of ``ranks`` and returns it on all of them; ``make_plan`` is called on that rank only.

    Args:
        make_plan: makes the plan; its exceptions are raised unchanged on the rank that plans.
        ranks: the global ranks that call this (see ``mesh_ranks``); all of the default process group if None.
        timeout: seconds, planning included, from this rank's call until it gives up.
        key: what the plan is for, such as the graph's hash; must be equal on all ranks.
        group: ranks and their store, instead of the default process group.

    Raises:
        RunError: if planning fails: at once, on all other ranks, with the type and first line of the error of the rank that plans. If ranks
            do not call this within ``timeout``: on all ranks, naming the missing ones. If ranks give different keys or call something else
            here. If the store is gone.
        OptionError: ``ranks`` are not ranks of the process group.
    """
    group = group or default_group(ranks)
    if group is None:
        return make_plan()
    with Meeting(group, f"share the plan ({key})" if key else "share the plan", timeout=timeout, work="plan") as meeting:
        if meeting.leads:
            plan = make_plan()
            text = plan.to_json()
            meeting.everyone()
            meeting.decide(text)
            return plan
        text = meeting.outcome()
    return ShardingPlan.from_json(text, f"the plan from {name_ranks([group.leader])}")


def fails_together(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an object with a ``device_mesh``: if it raises on one rank only, the others raise at their next meeting too, with that
    rank's error, and do not wait for it until their timeout."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            group = default_group(mesh_ranks(self.device_mesh))
            if group is not None and not told_to_all(error, group):
                with Meeting(group, "make a program"):
                    raise
            raise

    return run


@contextlib.contextmanager
def ends_together(topic: str, *, ranks: Sequence[int], timeout: float = TIMEOUT) -> Iterator[None]:
    """A block that ends without an error only if it does so on all ``ranks``: if it raises on one, the others raise that error at its end.

    ``topic``: what the block does, as in "rank 1 could not <topic>". ``timeout``: seconds that a rank waits for the others at the end.
    """
    group = default_group(ranks)
    try:
        yield
    except BaseException as error:
        if group is not None and not told_to_all(error, group):
            with Meeting(group, topic, timeout=timeout):
                raise
        raise
    if group is not None:
        agree(group, topic, "", lambda _: "", timeout)


def compare(fields: Mapping[str, str], *, ranks: Sequence[int] | None = None, timeout: float = TIMEOUT, group: Group | None = None) -> None:
    """Checks that all ranks have equal ``fields``; call it before the first collective.

    Args:
        fields: texts that must be equal. A name is a kind in ``REMEDIES``, alone or with details after a colon (``"value: args[0]"``),
            or anything else.
        ranks: the global ranks that call this (see ``mesh_ranks``); all of the default process group if None.
        timeout: seconds from this rank's call until it gives up.
        group: ranks and their store, instead of the default process group.

    Raises:
        RunError: on every rank, with the differing fields, each rank's value, and the remedy; or naming the ranks that did not come
            within ``timeout``; or if the store is gone.
        OptionError: ``ranks`` are not ranks of the process group.
    """
    group = group or default_group(ranks)
    if group is not None:
        note = json.dumps(dict(fields))
        agree(group, "compare what they run", note, lambda notes: difference({r: json.loads(n) for r, n in notes.items()}) or "", timeout)


def objection(mine: str | None, *, ranks: Sequence[int] | None = None, timeout: float = TIMEOUT, group: Group | None = None) -> str | None:
    """The objection of the lowest rank that has one, on all ranks; None if none has. Every rank calls this. Errors as in ``compare``."""
    group = group or default_group(ranks)
    if group is None:
        return mine
    topic = "agree whether a program serves these sizes"
    return agree(group, topic, mine or "", lambda notes: next((said for _, said in sorted(notes.items()) if said), ""), timeout) or None


def agreed(mine: str, what: str, *, ranks: Sequence[int] | None = None, timeout: float = TIMEOUT, group: Group | None = None) -> bool:
    """Whether ``mine`` is equal on all ranks; ``what`` describes it in errors. Every rank calls this. Errors as in ``compare``."""
    group = group or default_group(ranks)
    if group is None:
        return True
    return agree(group, what, mine, lambda notes: SAME if len(set(notes.values())) == 1 else "", timeout) == SAME


def difference(notes: Mapping[int, Mapping[str, str]]) -> RunError | None:
    """The error for ranks whose fields differ; None if they are equal."""
    names = dict.fromkeys(name for note in notes.values() for name in note)
    held = {name: _holders(notes, name) for name in names}
    differing = sorted((name for name in names if len(held[name]) > 1), key=_order)
    if not differing:
        return None
    first, others = differing[0], list(map(_phrase, differing[1 : MOST + 1]))
    what = f"the ranks differ in {_phrase(first)}: {_values_by_rank(held[first])}"
    if others:
        more = f" and {len(differing) - 1 - MOST} others" if len(differing) - 1 > MOST else ""
        what += f" (and in {', '.join(others)}{more})"
    return RunError(what, where=f"before the first collective of {name_ranks(notes)}", remedy=REMEDIES.get(_kind(first), _OTHERWISE))


def _holders(notes: Mapping[int, Mapping[str, str]], name: str) -> dict[str, list[int]]:
    """Each value and its ranks, ordered by the lowest rank."""
    held: dict[str, list[int]] = {}
    for rank in sorted(notes):
        held.setdefault(notes[rank].get(name, ABSENT), []).append(rank)
    return held


def _phrase(name: str) -> str:
    """``value: args[0]`` -> ``the value of args[0]``."""
    kind, _, detail = name.partition(": ")
    return f"the {kind} of {detail}" if detail else kind


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _order(name: str) -> int:
    kinds = list(REMEDIES)
    return kinds.index(_kind(name)) if _kind(name) in kinds else len(kinds)


def _values_by_rank(held: Mapping[str, list[int]], most: int = 4) -> str:
    """``ranks 0-2: a; rank 3: b``; of long values, the part from where they differ."""
    values = list(held)
    same = next((i for i, characters in enumerate(zip(*values, strict=False)) if len(set(characters)) > 1), 0)
    start = max(0, same - 10) if max(map(len, values)) > 60 else 0
    shown = "; ".join(f"{name_ranks(held[value])}: {_excerpt(value, start)}" for value in values[:most])
    return shown if len(values) <= most else f"{shown}; and {len(values) - most} other values"


def _excerpt(value: str, start: int, length: int = 60) -> str:
    end = start + length
    return f"{'...' if start else ''}{value[start:end]}{'...' if len(value) > end else ''}"


def checksum(tensor: torch.Tensor) -> str:
    """Hexadecimal hash of dtype, shape and every byte: equal for bitwise equal tensors (so 0.0 and -0.0 differ).

    Strides and device do not matter; a tensor on an accelerator is copied to the host. Meta and fake tensors have no values: only dtype and
    shape are hashed. Raises OptionError for a DTensor or a sparse tensor.
    """
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        kind = "a DTensor" if isinstance(tensor, DTensor) else f"a tensor of layout {tensor.layout}"
        raise OptionError(f"{kind} has no checksum", remedy="give a dense tensor that is the same on all ranks")
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    if not tensor.is_meta and not isinstance(tensor, FakeTensor):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The values in logical order; a copy, because memory exposed to numpy can no longer be resized, which FSDP does with parameters."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).to("cpu", copy=True)
    return memoryview(flat.view(torch.uint8).numpy())
