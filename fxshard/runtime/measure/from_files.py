"""``fxshard calibrate --nccl-tests FILE... --trace FILE``: a hardware file from what was measured before, without a device.

The preset gives what the files do not say, a link that no collective crosses too. Collectives become curves for groups of the measured
size and stride, and links for all other groups, as in ``calibrate``. Products and pointwise operators scale the preset's rates, one
number for each size of an element and one for the memory: the median of measured over predicted. What remains is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxshard.cost.fit import (
    CollectiveTime,
    OpTime,
    PredictionErrors,
    collective_errors,
    drop_collective_curves,
    fit_links,
    op_errors,
    rounded,
)
from fxshard.cost.timeline import unsharded_time
from fxshard.errors import OptionError
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.hardware_file import find_hardware
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.measure.calibration import Calibration
from fxshard.runtime.measure.kineto import Trace, read_trace
from fxshard.runtime.measure.nccl_tests import Table, read_table

STEPS = 5
"""Times that rates are scaled: an operator near the ridge of the roofline depends on two of them."""


def calibrated(
    tables: Sequence[str], traces: Sequence[str], hardware: str, nodes: int | None = None, per_node: int | None = None
) -> Calibration:
    """The hardware fitted to these files; ``hardware``: the preset or file that it starts from. Raises OptionError or FileError."""
    base = find_hardware(hardware)
    read = [read_table(one, nodes, per_node) for one in tables]
    seen = [read_trace(one) for one in traces]
    held = {one.per_node for one in read if one.ranks > one.per_node} or ({per_node} if per_node else set())
    if len(held) > 1:
        what = f"the files name nodes of {' and '.join(map(str, sorted(held)))} ranks, and hardware has nodes of one size"
        raise OptionError(what, where="--nccl-tests", remedy="give files of runs on as many devices a node")
    found = replace(base, name=f"measured {base.name}", node_size=next(iter(held), base.node_size))
    ops = [op for trace in seen for op in trace.ops]
    times = [one for table in read for one in table.times()] + [one for trace in seen for one in trace.collectives]
    found = _scaled(found, ops)
    timed = replace(found, launch=0.0)  # a trace times kernels, without their launches
    errors = tuple(op_errors(timed, [replace(op, fitted=False) for op in ops])) if ops else ()
    curves: tuple[PredictionErrors, ...] = ()
    links = curves
    if times:
        one = Mesh({"one": 1}, found)
        found = fit_links(one, times, keep=True)
        curves, links = (tuple(collective_errors(h, one, times)) for h in (found, drop_collective_curves(found)))
    return Calibration(rounded(found), _made(base, read, seen, times), errors, curves, links, fitted_ops=True)


def _scaled(hardware: Hardware, ops: Sequence[OpTime]) -> Hardware:
    """With the rates at which half of the operators take longer than predicted, and half less long."""
    for _ in range(STEPS):
        mesh = Mesh({"one": 1}, hardware)
        ratios: dict[int, list[float]] = {}
        for op in ops:
            key = op.call.operands[0].dtype.itemsize if op.name != "pointwise" else 0
            ratios.setdefault(key, []).append(op.time / unsharded_time(op.call, mesh))
        slower = {key: statistics.median(found) for key, found in ratios.items()}
        rates = {size: rate / slower.get(size, 1.0) for size, rate in hardware.flops.items()}
        hardware = replace(hardware, flops=rates, memory_bandwidth=hardware.memory_bandwidth / slower.get(0, 1.0))
    return hardware


def _made(base: Hardware, tables: Sequence[Table], traces: Sequence[Trace], times: Sequence[CollectiveTime]) -> Mapping[str, str]:
    """Where each figure is from."""
    from_tables = [f"{one.source} ({one.kind}, {one.ranks} ranks, {one.per_node} a node, {len(one.rows)} sizes)" for one in tables]
    seen = {op.name for trace in traces for op in trace.ops}
    kept = f"those of {base.name}"
    lost = any(trace.left_out for trace in traces)
    source = ", ".join(trace.source for trace in traces)
    said = {
        "collectives": "; ".join([*from_tables, *(t.source for t in traces if t.collectives)]) or kept,
        "rates": f"{source}: {', '.join(sorted(seen - {'pointwise'}))}; others {kept}" if seen - {"pointwise"} else kept,
        "memory_bandwidth": source if "pointwise" in seen else kept,
        "everything else": kept,
        **({"left out": "; ".join(f"{trace.source}: {trace}" for trace in traces if trace.left_out)} if lost else {}),
        "when": time.strftime("%Y-%m-%d"),
    }
    return said if times else {"links": f"not measured: {kept}", **said}
