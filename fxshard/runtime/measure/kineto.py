"""Reads a Chrome trace that ``torch.profiler`` exported with ``record_shapes=True``: products, pointwise operators and collectives.

Kineto's events: a ``cpu_op`` has the operator's name, shapes and dtypes; the kernels that it launched have its ``External id`` and their
own microseconds. Without a device, the operator's own duration counts. Kernels of NCCL carry the arguments that ``record_param_comms``
recorded (torch/csrc/distributed/c10d/ParamCommsUtils.hpp). What such an operator or kernel leaves unsaid is left out and listed.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxshard.cost.collectives import sent_fraction
from fxshard.cost.fit import CollectiveTime, OpTime
from fxshard.errors import FileError, OptionError
from fxshard.files import Field, parse_json, read_start
from fxshard.graph.call import Call, Operand, TensorMeta

Event = Mapping[str, Any]
DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
}
"""As Kineto writes dtypes of operands."""
SENT = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Byte": 1, "Char": 1, "Bool": 1, "Int": 4, "Long": 8}
"""Bytes of an element of a collective's buffer, by the dtype that ``record_param_comms`` writes."""
PRODUCTS = {"aten::mm": (0, "mk,kn->mn"), "aten::addmm": (1, "mk,kn->mn"), "aten::bmm": (0, "bmk,bkn->bmn")}
"""Product -> its first factor among the operands, and its equation."""
POINTWISE = {"aten::add": "aten.add.Tensor", "aten::mul": "aten.mul.Tensor", "aten::gelu": "aten.gelu.default"}
LEAST_BYTES = 1 << 20
"""Bytes of an operand below which a pointwise kernel says little about the memory's bandwidth: its start counts."""
TIMES = 1e-3, 1e12
"""Microseconds that an event may take: Kineto counts nanoseconds, and clocks that disagree make negative durations."""
MAX_SIZE = 2**48
"""Upper bound on a dim, on the elements of a tensor and of a message, and on ranks."""
MAX_TEXT, MAX_PARSED = 2**30, 2**33
"""Bytes of a trace's text, decompressed, and of memory that it may take once it is parsed, as ``files`` estimates it: a step of a large
model has some 10**5 events of 300 bytes."""
REMEDY = "export it again, with profiler.export_chrome_trace"
KINDS = (
    ("allreduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
)
"""Part of the name that ``record_param_comms`` gives a collective -> the collective as plans name it."""


@dataclass(frozen=True)
class Trace:
    """What a trace holds that prices can be held against. ``left_out``: what of it could not be used, and how many events."""

    source: str
    ops: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...]
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.left_out.items())


def read_trace(path: str | Path) -> Trace:
    """Raises FileError for what is no trace, OptionError for one without operators with shapes and without collectives of NCCL."""
    timed = list(_timed(parse_json(_text(path), str(path), REMEDY, MAX_PARSED)))
    left_out: Counter[str] = Counter()
    found = Trace(str(path), tuple(_ops(timed, left_out)), tuple(_collectives(timed, left_out)), left_out)
    if not found.ops and not found.collectives:
        what = f"{path} has neither products or pointwise operators with shapes nor collectives of NCCL that can be used"
        what += f"; left out: {found}" if left_out else ""
        raise OptionError(what, where="--trace", remedy="profile with torch.profiler.profile(record_shapes=True)")
    return found


def _text(path: str | Path) -> bytes:
    """The text of a file, perhaps compressed; never reads more than ``MAX_TEXT`` of it."""
    data = read_start(path, 2)
    try:
        if data == b"\x1f\x8b":
            with gzip.open(path) as file:
                data = file.read(MAX_TEXT + 1)
        else:
            data = read_start(path, MAX_TEXT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"the file is not a whole gzip file: {error}", where=str(path), remedy=REMEDY) from error
    if len(data) > MAX_TEXT:
        what = f"the trace has more than {MAX_TEXT / 2**20:.0f} MiB of text"
        raise FileError(what, where=str(path), remedy="profile fewer steps, as with torch.profiler.schedule(active=1)")
    return data


def _timed(root: Field) -> Iterator[Event]:
    """The events that take time; raises FileError where there is no list of events, or where what should be one is not."""
    events = root if isinstance(root.value, list) else root.get("traceEvents", lambda field: field)
    if not isinstance(events.value, list):
        raise events.fail("expected a list of events", REMEDY)
    for k, event in enumerate(events.value):  # Fields only for what is wrong: there may be millions
        if not isinstance(event, dict):
            raise Field(event, root.file, f"{events.path}[{k}]").fail("an event is an object", REMEDY)
        if event.get("ph") != "X" or "dur" not in event:
            continue
        if type(event["dur"]) not in (int, float):
            raise Field(event, root.file, f"{events.path}[{k}].dur").fail("a duration is a number of microseconds", REMEDY)
        if TIMES[0] <= event["dur"] <= TIMES[1]:
            yield event


def _args(event: Event) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _launch(event: Event) -> int | None:
    """What an operator has in common with its kernels."""
    found = _args(event).get("External id")
    return found if type(found) is int else None


def _ops(events: Sequence[Event], left_out: Counter[str]) -> Iterable[OpTime]:
    """The products and pointwise operators, each with the least time that the trace has for it: other work only adds time."""
    kernels: dict[int, float] = {}
    for e in events:
        if e.get("cat") == "kernel" and (launched := _launch(e)) is not None:
            kernels[launched] = kernels.get(launched, 0.0) + e["dur"]
    least: dict[Call, float] = {}
    for e in events:
        if e.get("cat") == "cpu_op" and (call := _call(str(e.get("name")), _args(e), left_out)) is not None:
            launched = _launch(e)
            time = float(e["dur"]) if not kernels else kernels.get(launched, 0.0) if launched is not None else 0.0
            if time > 0:
                least[call] = min(least.get(call, math.inf), time)
    for call, time in least.items():
        dtype = str(call.operands[0].dtype).removeprefix("torch.")
        yield OpTime(f"product, {dtype}" if call.op == "fxshard.einsum.default" else "pointwise", call, time, True)


def _call(name: str, args: Mapping[str, Any], left_out: Counter[str]) -> Call | None:
    """The call to price; None for another operator, or one too small, or one that does not say all."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if name not in (*PRODUCTS, *POINTWISE) or not isinstance(shapes, list) or not isinstance(types, list):
        return None
    metas = [_meta(shape, dtype) for shape, dtype in zip(shapes, types, strict=False)]
    if name in PRODUCTS:
        first, equation = PRODUCTS[name]
        pair = metas[first : first + 2]
        rank = len(equation.split(",")[0])
        if len(pair) < 2 or any(meta is None or len(meta.shape) != rank for meta in pair):
            return None
        a, b = (meta for meta in pair if meta is not None)
        if a.dtype != b.dtype or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
            left_out["products of shapes or dtypes that do not fit"] += 1
            return None
        result = TensorMeta((*a.shape[:-1], b.shape[-1]), a.dtype)
        return Call("fxshard.einsum.default", (Operand(0), Operand(1), equation), (), (a, b), (result,))
    tensors = [meta for meta in metas if meta is not None and meta.shape]
    if not tensors or any(meta.shape != tensors[0].shape for meta in tensors) or _size(tensors[0]) < LEAST_BYTES:
        return None
    return Call(POINTWISE[name], tuple(map(Operand, range(len(tensors)))), (), tuple(tensors), (tensors[0],))


def _meta(shape: Any, dtype: Any) -> TensorMeta | None:
    """None for what is no tensor, and for one without elements, which says nothing."""
    plain = isinstance(shape, list) and all(_whole(size) is not None for size in shape)
    known = isinstance(dtype, str) and dtype in DTYPES
    return TensorMeta(tuple(shape), DTYPES[dtype]) if plain and known and math.prod(shape) <= MAX_SIZE else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= MAX_SIZE else None


def _size(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def _collectives(events: Sequence[Event], left_out: Counter[str]) -> Iterable[CollectiveTime]:
    """NCCL's kernels, for each group and size the least time of the trace: a kernel also waits until the slowest rank has come."""
    least: dict[tuple[str, tuple[int, int]], dict[int, float]] = {}
    for e in events:
        if e.get("cat") == "kernel" and (found := _communication(_args(e), left_out)) is not None:
            kind, group, sent = found
            sizes = least.setdefault((kind, group), {})
            sizes[sent] = min(sizes.get(sent, math.inf), float(e["dur"]))
    for (kind, group), sizes in least.items():
        for k, (sent, time) in enumerate(sorted(sizes.items())):
            yield CollectiveTime(kind, 0, sent, time, k % 2 == 0 or k == len(sizes) - 1, group)


def _communication(args: Mapping[str, Any], left_out: Counter[str]) -> tuple[str, tuple[int, int], int] | None:
    """(kind, (size, stride) of the group, bytes that a rank sends); None for what is no collective of this kind."""
    name, size, dtype = str(args.get("Collective name", "")).lower(), _whole(args.get("Group size")), str(args.get("dtype", ""))
    kind = next((kind for part, kind in KINDS if part in name), None)
    width = next((width for known, width in SENT.items() if known.lower() == dtype.lower()), None)
    if kind is None or size == 1:
        return None
    count = _whole(args.get("Out msg nelems" if kind == "all_gather" else "In msg nelems"))
    if width is None or size is None or count is None:
        left_out["collectives without a known dtype, size or group"] += 1
        return None
    stride = _stride(str(args.get("Process Group Ranks", "")), size)
    if stride is None:
        left_out["collectives of groups whose ranks are not equally far apart"] += 1
        return None
    return kind, (size, stride), round(count * width * sent_fraction(kind, size))


def _stride(ranks: str, size: int) -> int | None:
    """How far apart the ranks of a group are; None if they are not equally far apart. No ranks: the default group's.

    ``ranks``: "[0, 8, 16, 24]"; of more than 30, torch writes the first ones, an ellipsis and the last: "[0, 8, ..., 504]"
    (torch/csrc/profiler/util.cpp).
    """
    parts = [part.strip() for part in ranks.strip("[] ").split(",")]
    if parts == [""]:
        return 1
    head, rest = (parts[: parts.index("...")], parts[parts.index("...") + 1 :]) if "..." in parts else (parts, [])
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in (*head, *rest)):
        return None
    places = {**{k: int(part) for k, part in enumerate(head)}, **{size - len(rest) + k: int(part) for k, part in enumerate(rest)}}
    if len(places) < 2 or ("..." not in parts and len(places) != size):
        return None
    stride = (max(places.values()) - places[0]) // max(places)
    return stride if stride > 0 and all(rank == places[0] + stride * k for k, rank in places.items()) else None
