"""Traces of torch.profiler: one of this CPU, and one written as Kineto writes it for a GPU whose rates are known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxshard import files
from fxshard.cli import main as cli
from fxshard.cost import collective_time
from fxshard.errors import FileError, OptionError
from fxshard.mesh.hardware import HARDWARE
from fxshard.mesh.hardware_file import load
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.measure import kineto
from fxshard.runtime.measure.kineto import Trace, read_trace


def launched(number: int, name: str, shapes: list[list[int]], dtype: str, dur: float) -> list[dict[str, Any]]:
    """The events of an operator, which takes 5 us on the host, and of its kernel."""
    about = {"External id": number}
    operator = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 10 * number, "dur": 5.0}
    operator["args"] = {**about, "Input Dims": shapes, "Input type": [dtype] * len(shapes)}
    return [operator, {"ph": "X", "cat": "kernel", "name": "k", "ts": 10 * number + 7, "dur": dur, "args": about}]


def sent(name: str, elements: int, dur: float) -> dict[str, Any]:
    about = {"Collective name": name, "dtype": "BFloat16", "In msg nelems": elements, "Out msg nelems": 8 * elements, "Group size": 8}
    about["Process Group Ranks"] = "[0, 8, 16, 24, 32, 40, 48, 56]"
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 1, "dur": dur, "args": about}


def test_rates_and_collectives_of_a_gpu(tmp_path: Path) -> None:
    """Products at 100 TFLOP/s, copies at 1 TB/s, gathers at 10 GB/s on a rank a node: on hardware without an architecture, as formulas."""
    events = [
        *launched(1, "aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16", 2 * 4096**3 / 100e12 * 1e6),
        *launched(2, "aten::addmm", [[8192], [2048, 8192], [8192, 8192]], "c10::BFloat16", 2 * 2048 * 8192**2 / 100e12 * 1e6),
        *launched(3, "aten::add", [[2**26], [2**26]], "float", 3 * 4 * 2**26 / 1e12 * 1e6),
        *launched(4, "aten::relu", [[2**26]], "float", 1.0),
        *(sent("_allgather_base", 2**k, 100 + 7 * 2 * 2**k / 10e9 * 1e6) for k in range(10, 27)),
        sent("_allgather_base", 2**20, 9e6),
    ]
    path, out = tmp_path / "trace.json.gz", tmp_path / "hardware.json"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode()))
    base = tmp_path / "base.json"
    plain = {"name": "gpu", "flops": {"2": 5e14, "4": 5e13}, "memory_bandwidth": 3e12, "launch": 3.0, "node_size": 8}
    links = {"inside": {"bandwidth": 3e11, "latency": 2.0}, "between": {"bandwidth": 5e10, "latency": 4.0}}
    base.write_text(json.dumps({"format": "fxshard-hardware", "version": 1, **plain, **links}))
    assert cli.main(["calibrate", "--trace", str(path), "--hardware", str(base), "-o", str(out)]) == 0
    found = load(out)
    assert found.flops == {2: pytest.approx(100e12, rel=1e-3), 4: 5e13} and found.memory_bandwidth == pytest.approx(1e12, rel=1e-3)
    assert found.between is not None and found.between.bandwidth == pytest.approx(10e9, rel=0.02)
    bytes_ = 7 * 2 * 2**20
    assert collective_time("all_gather", 0, bytes_, Mesh({"dp": 8, "tp": 8}, found)) == pytest.approx(100 + bytes_ / 10e9 * 1e6, rel=0.02)
    rows = {row["what"]: row for row in json.loads(out.read_text())["errors"]}
    assert abs(rows["product, bfloat16"]["worst"]) < 1e-3


def test_a_trace_of_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is FLOPs over the least duration that the profiler exported; the launches of a CPU have no kernels."""
    a, path = torch.rand(192, 192), tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for _ in range(5):
            a @ a
    prof.export_chrome_trace(str(path))
    took = [e["dur"] for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "aten::mm"]
    assert len(took) == 5
    out = tmp_path / "hardware.json"
    assert cli.main(["calibrate", "--trace", str(path), "--hardware", "cpu", "-o", str(out)]) == 0
    assert "on the operators that the rates were fitted to" in capsys.readouterr().out
    assert load(out).flops[4] == pytest.approx(2 * 192**3 / min(took) * 1e6, rel=1e-3)
    assert load(out).flops[8] == HARDWARE["cpu"].flops[8]


def product(*shapes: list[Any], dtype: Any = "float", **more: Any) -> dict[str, Any]:
    args = {"Input Dims": [*shapes], "Input type": [dtype] * len(shapes)}
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 7.0, "args": args, **more}


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path, events = tmp_path / "trace.json", []
    for value in (5, None, {}, {"traceEvents": None}, {"traceEvents": [product([4, 4], [4, 4]), None]}, "x"):
        path.write_text(json.dumps(value))
        with pytest.raises(FileError):
            read_trace(path)
    for dur in (True, "7", [1]):
        path.write_text(json.dumps([product([4, 4], [4, 4], dur=dur)]))
        with pytest.raises(FileError, match="a duration is a number") as error:
            read_trace(path)
        assert str(error.value.where).endswith("[0].dur")
    for shapes in (([4, -4], [-4, 4]), ([0, 4], [4, 4]), ([True, 4], [4, 4]), ([4, 10**400], [10**400, 4]), ([1024, 1024], [512, 1024])):
        events.append(product(*shapes))
    events += [product([4, 4], [4, 4], dtype=["float"]), product([4, 4], [4, 4], dur=0), product([4, 4], [4, 4], dur=-3.0)]
    path.write_text(json.dumps(events))
    with pytest.raises(OptionError, match="left out: 1 products of shapes or dtypes that do not fit"):
        read_trace(path)
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 2, "dur": 3.0}
    events = [product([4, 4], [4, 4]), *({**kernel, "args": {"External id": odd}} for odd in ([1], None, "x"))]
    path.write_text(json.dumps(events))
    assert [op.time for op in read_trace(path).ops] == [7.0], "kernels of nobody"


def test_large_groups_and_what_is_left_out(tmp_path: Path) -> None:
    """Of more than 30 ranks, torch writes the first ones and the last."""
    path = tmp_path / "trace.json"

    def read(*groups: tuple[int, str]) -> Trace:
        events = [sent("allreduce", 2**20 + k, 50.0) for k in range(len(groups))]
        for event, (size, ranks) in zip(events, groups, strict=True):
            event["args"] |= {"Group size": size, "Process Group Ranks": ranks}
        path.write_text(json.dumps(events))
        return read_trace(path)

    head = ", ".join(str(8 * k) for k in range(29))
    whole = [(64, f"[{head}, ..., 504]"), (64, f"[{head}, ...]"), (64, "[0, ..., 63]"), (4, "[1, 3, 5, 7]"), (16, "")]
    found = read(*whole)
    assert {one.group for one in found.collectives} == {(64, 8), (64, 1), (4, 2), (16, 1)} and not found.left_out
    odd = [
        (64, f"[{head}, ..., 505]"),
        (4, "[0, 1, 3, 4]"),
        (4, "[0, 1]"),
        (4, "[3, 2, 1, 0]"),
        (4, "[0, 0, 0, 0]"),
        (4, f"[{'9' * 5000}, 1]"),
    ]
    with pytest.raises(OptionError, match="left out: 6 collectives of groups whose ranks are not equally far apart"):
        read(*odd)
    read(*odd, *whole)
    assert cli.main(["calibrate", "--trace", str(path), "--hardware", "h100", "-o", str(tmp_path / "h.json")]) == 2, "one size only"
    path.write_text(
        json.dumps([*json.loads(path.read_text()), product([64, 64], [64, 64]), *(sent("allreduce", 2**k, 2**k) for k in (9, 20))])
    )
    assert cli.main(["calibrate", "--trace", str(path), "--hardware", "h100", "-o", str(tmp_path / "h.json")]) == 0
    assert "6 collectives of groups" in json.loads((tmp_path / "h.json").read_text())["made"]["left out"]


def test_traces_have_limits_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of a real step is larger than other files may be, and what it decompresses to is bounded."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps([product([64, 64], [64, 64])] * 100).encode()))
    monkeypatch.setattr(files, "MAX_PARSED", 1000)
    assert len(read_trace(path).ops) == 1
    monkeypatch.setattr(kineto, "MAX_TEXT", 2**20)
    for data in (gzip.compress(bytes(2**24)), bytes(2**24)):
        path.write_bytes(data)
        with pytest.raises(FileError, match=r"more than 1 MiB of text[\s\S]*fewer steps"):
            read_trace(path)


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(OptionError, match="neither products"):
        read_trace(path)
    path.write_bytes(b"\x1f\x8b cut")
    with pytest.raises(FileError, match="not a whole gzip file"):
        read_trace(path)
    whole = bytearray(gzip.compress(b"[]" * 1000))
    whole[12:20] = b"\xff" * 8
    path.write_bytes(whole)
    with pytest.raises(FileError, match="not a whole gzip file"):
        read_trace(path)
    assert cli.main(["calibrate", "--trace", str(path)]) == 2
