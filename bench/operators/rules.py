"""Judges the rules of torch's core operators by the oracle: which are wrong, and which share of all valid combinations they offer.

    python -m bench.operators.rules [--samples 6] [--budget 400]

fxshard's and DTensor's rules are asked about the same samples and combinations. The operators themselves decide which combinations are
valid.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree
from tqdm import tqdm

from bench.operators.state import Record, read_records, resumed
from fxshard.graph.call import Operand
from fxshard.strategies.oracle import BUDGET, IDEMPOTENT, Sample, Verdict, check_op, direct_samples, operator, record, spread_out

STATE = Path(".ops/rules.jsonl")
SAMPLES = 6
LIMIT = 120.0
DTENSOR_RANKS = (2, 4)
"""Mesh sizes on which DTensor is asked; a combination counts if DTensor accepts it on one of them."""
NO_NOTE = "no valid combination was found; the rule gives no reason"
NO_SAMPLES = "torch has no samples"
SYMBOLIC = "returns a size, does not compute with numbers"


def core_operators() -> list[str]:
    """The aten overloads with the tag ``torch.Tag.core``."""
    packets = [getattr(torch.ops.aten, name, None) for name in sorted(dir(torch.ops.aten))]
    overloads = [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    return sorted({str(o) for o in overloads if torch.Tag.core in o.tags})


def prepare() -> None:
    """Prepares a process: one thread, and a fake process group."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=max(DTENSOR_RANKS), store=dist.HashStore())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operators.rules", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples per operator")
    parser.add_argument("--budget", type=int, default=400, help=f"combinations per sample (the oracle's own default is {BUDGET})")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="discard earlier records")
    options = parser.parse_args(arguments)
    print(tabulate(rows(measure(options.samples, options.budget, options.workers, options.again)), headers=["", "ours", "DTensor"]))
    return 0


def measure(samples: int = SAMPLES, budget: int = 400, workers: int = 2, again: bool = False) -> list[Record]:
    """One record per core operator; those in the state file are not measured again."""
    if again:
        STATE.unlink(missing_ok=True)
    every, known = core_operators(), read_records(STATE)
    if any(op not in known for op in every):
        STATE.parent.mkdir(exist_ok=True)
        _write_samples(every, samples)
    job = functools.partial(judge_operator, budget=budget)
    return resumed(STATE, every, job, prepare, workers, LIMIT, lambda op, outcome: {"key": op, "lost": outcome}, "operator")


def _write_samples(ops: Sequence[str], count: int) -> None:
    """Writes the samples to a file for the processes; one run of torch's entries records them all."""
    found = record(ops)
    chosen = {op: spread_out(found.get(op) or direct_samples(op), count) for op in tqdm(ops, desc="samples", unit="operator")}
    torch.save({op: [(s.args, s.kwargs) for s in samples if _is_plain(s)] for op, samples in chosen.items()}, STATE.with_name("samples.pt"))


def _is_plain(sample: Sample) -> bool:
    """Whether the sample can be written to a file: one with a generator cannot."""
    try:
        torch.save((sample.args, sample.kwargs), io.BytesIO())
    except Exception:
        return False
    return True


@functools.cache
def _samples(written: float) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(STATE.with_name("samples.pt"), weights_only=False)
    return found


def judge_operator(op: str, budget: int) -> Record:
    """The record of one operator: the number of valid combinations, how many of them fxshard and DTensor offer, and fxshard's wrong ones as
    text."""
    given = _samples(os.path.getmtime(STATE.with_name("samples.pt")))[op]
    verdict = check_op(op, [Sample(op, args, kwargs) for args, kwargs in given], budget)
    valid = [(j.sample, o.inputs) for j in verdict.judged for o in (*j.valid, *(f.option for f in j.missing))]
    theirs = sum(_theirs(sample, inputs) for sample, inputs in valid)
    return {
        "key": op,
        "samples": len(given),
        "valid": len(valid),
        "ours": verdict.valid,
        "theirs": theirs,
        "wrong": [str(f) for f in verdict.wrong],
        "missing": sorted({str(f.option) for f in verdict.missing}),
        "unsearched": verdict.unsearched,
        "shards": _shards(verdict),
        "note": verdict.note,
    }


def _shards(verdict: Verdict) -> bool:
    """Whether fxshard's rule shards a tensor in some sample; the output of a factory function counts."""
    from fxshard.mesh.mesh import Mesh
    from fxshard.strategies import op_strategy
    from fxshard.strategies.oracle.samples import call_of_sample, filled, run

    for judged in verdict.judged:
        try:
            call = call_of_sample(judged.sample, run(judged.sample.op, *filled(judged.sample, judged.sample.tensors)))
        except Exception:
            continue
        if len(op_strategy(call, Mesh({"a": 2})).specs) > 1:
            return True
    return False


def _theirs(sample: Sample, inputs: Sequence[Any]) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    from fxshard._torch_compat.dtensor.rules import dtensor_takes

    args, kwargs = pytree.tree_map(lambda a: functools.partial(_pick, a.index) if isinstance(a, Operand) else a, sample.marked)
    metas = [(tuple(t.shape), t.dtype) for t in sample.tensors]
    meshes = [init_device_mesh("cpu", (n,)) if n == max(DTENSOR_RANKS) else _first(n) for n in DTENSOR_RANKS]
    op = operator(sample.op)
    return any(dtensor_takes(op, args, kwargs, metas, given, mesh) for given in _read_as(inputs) for mesh in meshes)


def _read_as(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The combination, and equivalent ones: a replicated tensor is also a pending average, maximum or minimum of itself, which fxshard's
    rule may name instead."""
    found = [tuple(inputs)]
    for pending in dict.fromkeys(p for p in inputs if p in IDEMPOTENT):
        whole = [i for i, p in enumerate(inputs) if isinstance(p, Replicate)]
        for places in (whole, *([i] for i in whole)):
            found.append(tuple(pending if i in places else p for i, p in enumerate(inputs)))
    return found


@functools.cache
def _first(ranks: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", list(range(ranks)))


def _pick(index: int, specs: Sequence[Any]) -> Any:
    return specs[index]


def rows(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """(what, ours, DTensor's) for the table of operator coverage."""
    judged = [r for r in records if "lost" not in r]
    possible = [r for r in judged if r["valid"] or r["shards"]]
    valid, ours, theirs = (sum(r[key] for r in judged) for key in ("valid", "ours", "theirs"))
    shards = [sum(bool(r["shards"]) for r in possible), sum(bool(r["theirs"]) for r in possible)]
    return [
        ("core operators with a rule that shards, where one exists", f"{shards[0]} of {len(possible)}", f"{shards[1]} of {len(possible)}"),
        ("valid combinations on core operators", f"{ours} of {valid} ({ours / valid:.1%})", f"{theirs} ({theirs / valid:.1%})"),
        ("rules of core operators that are wrong", str(sum(bool(r["wrong"]) for r in judged)), "not judged"),
        ("core operators whose kernels crashed while they were judged", str(len(records) - len(judged)), ""),
    ]


def exceptions(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(operator, reason) for core operators for which no valid combination was found."""
    asked = [r for r in records if _why_not_asked(r) is None]
    return [(r["key"], r["note"] or NO_NOTE) for r in asked if not r["valid"] and not r["shards"]]


def not_asked(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(operator, reason) for core operators that could not be judged."""
    return [(r["key"], reason) for r in records if (reason := _why_not_asked(r)) is not None]


def _why_not_asked(r: Record) -> str | None:
    if "lost" in r:
        return f"its process was lost: {r['lost']}"
    if r["valid"] or r["shards"]:
        return None
    if r["key"].startswith("aten.sym_"):
        return SYMBOLIC
    return None if r["note"] or r["samples"] else NO_SAMPLES


def missing(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(operator, combinations) that are valid and that our rule does not offer."""
    return [(r["key"], "; ".join(r["missing"]).replace("|", " or ")) for r in records if r.get("missing")]


if __name__ == "__main__":
    raise SystemExit(main())
