"""Time of a node with its own collectives: rows that travel to experts, which nothing runs beside; and ring attention, in which k and v
travel beside the compute (Liu et al., 2023).

On n ranks, step i = 0 .. n-1 attends to one block while the shift of k and v for step i + 1 runs. In the backward the shift of the sums of
dk and dv after step i = 1 .. n-1 runs beside step i + 1; the last one, which brings them home, runs beside nothing. Of communication beside
compute, the part ``Hardware.overlap`` is free.
Under a causal mask, the last rank sets the pace: its step 0 is the half block on the diagonal, and it sees all of every other block. If
blocks are dealt head-to-tail, each step is half a block for all ranks. Dealing takes collectives beside nothing, and copies before and
after.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fxshard.cost.collectives import ROWS as TRAVELLING
from fxshard.cost.collectives import collective_time
from fxshard.cost.compute import Work, traffic_time, work_of
from fxshard.graph.call import Call
from fxshard.graph.planning_graph import UNKNOWN
from fxshard.layout.layouts import ceil_shape
from fxshard.mesh.architectures import Architecture
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies import own_collectives

QUERIES = {"fxshard.sdpa.default": 0, "fxshard.sdpa_backward.default": 1}
"""Attention -> the operand that is its queries."""
SEQUENCE = 2
ROWS = ("fxshard.to_experts.default", "fxshard.from_experts.default")
"""Operators that send rows to the ranks of their experts, and back."""


@lru_cache(maxsize=8192)
def node_times(call: Call, specs: tuple[OpSpec, ...], mesh: Mesh) -> tuple[float, ...]:
    """``node_time`` of each spec. The work is found once for all hardware of an architecture, so that other prices are quick to try."""
    if call.op in ROWS:
        return tuple(rows_time(call, spec, mesh) for spec in specs)
    hardware, works = mesh.hardware, _works(call, specs, mesh.shape, mesh.hardware.reached)
    times = (0.0 if work is None else work.time(hardware) for work in works)
    if call.op not in QUERIES:
        return tuple(times)
    return tuple(_with_blocks(call, spec, mesh, time) for spec, time in zip(specs, times, strict=True))


@lru_cache(maxsize=8192)
def _works(call: Call, specs: tuple[OpSpec, ...], mesh: tuple[int, ...], reached: Architecture | None) -> tuple[Work | None, ...]:
    return tuple(work_of(call, spec, mesh, reached) for spec in specs)


def node_time(call: Call, spec: OpSpec, mesh: Mesh) -> float:
    """Microseconds of a node on the rank with the most work: its compute, and what its own collectives add."""
    return node_times(call, (spec,), mesh)[0]


def _with_blocks(call: Call, spec: OpSpec, mesh: Mesh, compute: float) -> float:
    """Microseconds of attention that takes ``compute`` on all its scores at once: as a ring where the sequence is sharded."""
    query = QUERIES.get(call.op)
    if query is None or not spec.inputs[query].axes_on(SEQUENCE) or UNKNOWN in call.operands[query].shape:
        return compute
    backward = query == 1
    causal = call.arg(7 if backward else 4) is True
    own = own_collectives(call, spec, mesh)
    if not own:
        return compute + causal * merging_time(call, spec, mesh, query)
    axis = mesh.axis(own[0].axis)
    times = {kind: [collective_time(c.kind, axis, c.bytes(mesh), mesh) for c in own if c.kind == kind] for kind in ("shift", "zigzag")}
    ranks, dealt = mesh.shape[axis], math.fsum(times["zigzag"])
    if dealt:  # all ranks do as much: half of the scores, where the last rank of the sequence in order sees all but half a block
        compute *= ranks / (2 * ranks - 1)
        dealt += sum(traffic_time(mesh.hardware, 4 * c.bytes(mesh)) for c in own if c.kind == "zigzag")
    steps = ring_time(compute, times["shift"][0], ranks, backward, causal and not dealt, mesh.hardware.overlap)
    return steps + dealt + (ranks - 1) * merging_time(call, spec, mesh, query)


def rows_time(call: Call, spec: OpSpec, mesh: Mesh) -> float:
    """Microseconds to send rows to their experts or back: collectives, and copies of the rows to sort and to receive them. Nothing if rows
    stay. As many rows as a rank has of its own tokens are expected at its experts; on two axes, those on the way are picked from a buffer
    for the rows of all tokens of the first."""
    own = own_collectives(call, spec, mesh)
    if not own:
        return 0.0
    at = spec.outputs[0] if spec.inputs[0].expert_axes else spec.inputs[0]
    rows = math.prod(ceil_shape(call.operands[0].shape, at, mesh.shape)) * call.operands[0].dtype.itemsize
    sent = math.fsum(collective_time(c.kind, mesh.axis(c.axis), c.bytes(mesh), mesh) for c in own)
    sorted_rows = (rows * c.room // (1 if c.kind == "dispatch" else mesh.shape[mesh.axis(c.axis)]) for c in own if c.kind in TRAVELLING)
    return sent + traffic_time(mesh.hardware, sum(2 * buffer + 2 * rows for buffer in sorted_rows))


def ring_time(compute: float, shift: float, ranks: int, backward: bool, causal: bool, overlap: float) -> float:
    """Microseconds of ring attention, from those of all its ``compute`` on the last rank and of one ``shift``."""
    block = compute / (ranks - 0.5 if causal else ranks)
    hidden = 0.0
    for step in range(ranks):
        beside = shift * ((step < ranks - 1) + (backward and step > 1))
        hidden += min(beside, block / 2 if causal and step == 0 else block)
    return compute + shift * (ranks - 1) * (2 if backward else 1) - overlap * hidden


def merging_time(call: Call, spec: OpSpec, mesh: Mesh, query: int) -> float:
    """Microseconds to add the results of a block to those of the blocks before: reads both, writes one."""
    q = call.operands[query]
    wide = 8 if q.dtype == torch.float64 else 4
    return traffic_time(mesh.hardware, math.prod(ceil_shape(q.shape, spec.inputs[query], mesh.shape)) * (2 * wide + q.dtype.itemsize))
