"""The watchdog: if another rank raises, is killed or stalls, this one raises an error that names it, within ``timeout``.

The backend ends the wait itself: while a program runs, its process groups have a timeout a little shorter than the user's (and a connection
to a dead process closes at once). The backend's error names an address at best; the heartbeats in the store tell which rank is to blame
(see ``heartbeat``). The first rank that finds out records it for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fxshard._torch_compat.groups import backend_of, devices_of, is_lost_connection
from fxshard.errors import FxshardError, RunError
from fxshard.passes.after_lowering.forward_backward import forward_collectives
from fxshard.program.sharded_program import ProgramCollective
from fxshard.runtime.groups.reduce_scatter import as_issued
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.ranks.agreement import STORE_LOST_REMEDY, TIMEOUT, name_ranks
from fxshard.runtime.ranks.debug import CollectiveChecks, debugging
from fxshard.runtime.ranks.heartbeat import MISSED_BEATS, PERIOD, Activity, Heartbeat, RankStatus, first_line, heartbeat
from fxshard.runtime.ranks.launch import mesh_ranks

GRACE = 10.0
"""Seconds that a rank has to return after its process groups were aborted."""
FORWARD, BACKWARD = "forward", "backward"
REMEDIES: Mapping[str, str] = {
    "raised": "see the traceback in the output of that rank",
    "ended": "call the model the same number of times on all ranks; if that rank failed, see its output",
    "silent": "see the output of that rank and the log of its machine (out of memory?); start again from a checkpoint",
    "behind": "see what that rank is doing (py-spy dump --pid ...); if it is only slow, raise timeout (seconds)",
    "nobody": "see the network between the ranks; debug=True (FXSHARD_DEBUG=1) tells whether they issue different collectives",
}


class Watchdog:
    """Runs the forward and backward of one program on this rank."""

    def __init__(self, bound: BoundProgram, timeout: float = TIMEOUT, debug: bool = False) -> None:
        self.heartbeat, self.timeout, self.debug = heartbeat() if bound.groups else None, timeout, debugging(debug)
        self.ranks = mesh_ranks(bound.device_mesh)
        if self.heartbeat is None:
            return
        groups = [bound.device_mesh.get_group(i) for i in range(bound.program.mesh.ndim)]
        limit = collective_timeout(timeout)
        self.timeouts = [_timeouts(group, bound.device, limit) for group in groups]
        alarm = partial(_abort_stuck_collective, self.heartbeat, self.ranks)
        self.activity = {part: _activity(bound, part, groups, timeout + GRACE, alarm) for part in (FORWARD, BACKWARD)}

    def run(self, part: str, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Runs ``function(inputs)`` as one half of the program.

        If another rank was lost, raises RunError that names the rank to blame; other exceptions of ``function`` pass unchanged.
        """
        if self.heartbeat is None:
            return function(inputs)
        activity = self.activity[part]
        checks = CollectiveChecks(activity, self.ranks, self.timeout) if self.debug else contextlib.nullcontext()
        with watched(self.heartbeat, activity, self.timeouts, self.ranks), checks:
            return function(inputs)


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of a collective on ``backend``: ``ours`` while a program runs, ``usual`` otherwise."""

    backend: Any
    ours: timedelta
    usual: timedelta


def collective_timeout(timeout: float) -> float:
    """Seconds that a collective may wait, leaving enough of ``timeout`` to find the cause."""
    return max(timeout / 2, timeout - (MISSED_BEATS + 2) * PERIOD)


@contextlib.contextmanager
def watched(heartbeat: Heartbeat, activity: Activity, timeouts: Sequence[Timeouts], ranks: Sequence[int]) -> Iterator[None]:
    """While the block runs, other ranks can see that this one does ``activity``; raises as ``Watchdog.run``."""
    before = heartbeat.enter(activity)
    for limit in timeouts:
        limit.backend.set_timeout(limit.ours)
    try:
        yield
    except BaseException as error:
        fault = _explain(heartbeat, activity, ranks, error)
        if fault is None:
            raise
        raise fault from error
    finally:
        for limit in timeouts:
            limit.backend.set_timeout(limit.usual)
        heartbeat.leave(before)


@contextlib.contextmanager
def watching(what: str, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> Iterator[None]:
    """While the block runs, a lost rank of ``group`` (default: all) is an error on the others, as in a program.

        with watching("save the checkpoint"):
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    ``what``: what the ranks do here, for the message. ``timeout``: seconds that a collective of ``group`` may wait. Every rank of the group
    enters the block. Raises RunError that names the rank; the block's own exceptions pass unchanged.
    """
    own = heartbeat()
    if own is None:
        yield
        return
    chosen = group if group is not None else dist.group.WORLD
    timeouts = [_timeouts(chosen, kind, collective_timeout(timeout)) for kind in devices_of(chosen)]
    activity, ranks = Activity(repr(what), [chosen]), dist.get_process_group_ranks(chosen)
    with watched(own, activity, timeouts, ranks):
        yield


def _timeouts(group: Any, device: torch.device, seconds: float) -> Timeouts:
    backend, usual = backend_of(group, device)
    return Timeouts(backend, min(timedelta(seconds=seconds), usual), usual)


def _activity(bound: BoundProgram, part: str, groups: Sequence[Any], limit: float, alarm: Callable[[Activity], None]) -> Activity:
    known: list[str] = []
    program, backends = bound.program, dict(bound.backends)

    def names() -> Sequence[str]:
        if not known:
            pairs = zip(program.collectives, forward_collectives(program), strict=True)
            known.extend(_name(c, as_issued(backends, c).kind) for c, first in pairs if first == (part == FORWARD))
        return known

    return Activity(f"the {part} of program {program.hash[:12]}", groups, names, limit, alarm)


def _name(collective: ProgramCollective, issued: str) -> str:
    planned = "" if issued == collective.kind else f", for a {collective.kind}"
    return f"{issued} of {collective.node!r} over {collective.axis}{planned}"


def _explain(heartbeat: Heartbeat, activity: Activity, ranks: Sequence[int], error: BaseException) -> RunError | None:
    """Reports ``error`` to the other ranks; returns the error to raise if another rank caused it."""
    if isinstance(error, FxshardError) or not is_lost_connection(error):
        if heartbeat.state != "cut off":
            heartbeat.report("raised", first_line(error))
        return None
    heartbeat.report("cut off")
    return _before_sigterm(partial(fault_of, heartbeat, activity, ranks))


def _before_sigterm(find: Callable[[], RunError]) -> RunError:
    """Calls ``find()`` and delays a SIGTERM until its error is on stderr: torchrun kills all ranks as soon as one has failed."""
    came: list[int] = []
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if usual:
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        error = find()
    finally:
        if usual:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if came:
        print(error, file=sys.stderr, flush=True)
        signal.raise_signal(signal.SIGTERM)
    return error


def fault_of(heartbeat: Heartbeat, activity: Activity, ranks: Sequence[int]) -> RunError:
    """The error that says who is to blame for ending ``activity``; takes as long as a living rank may be silent."""
    me, place = name_ranks([heartbeat.rank]), activity.place()
    try:
        found = heartbeat.settle() or heartbeat.settle(json.dumps(blame(heartbeat, ranks)))
    except RuntimeError as error:
        what = f"{me} lost both a collective and the process group's store: {first_line(error)}; it was in {place}"
        return RunError(
            what, where=place, remedy=f"{STORE_LOST_REMEDY}; docs/faults.md shows a store outside the ranks, which can name the rank"
        )
    fault = json.loads(found)
    return RunError(f"{fault['what']}; {me} was in {place}", where=fault["where"] or place, remedy=REMEDIES[fault["kind"]])


def blame(heartbeat: Heartbeat, ranks: Sequence[int]) -> dict[str, str]:
    """The fault as seen from a rank that was cut off: kind (of ``REMEDIES``), what, where. Raises RuntimeError without a store."""
    others = [rank for rank in ranks if rank != heartbeat.rank]
    first, started = heartbeat.statuses(others), time.monotonic()
    while True:
        statuses = heartbeat.statuses(others)
        if settled := heartbeat.settle():
            return json.loads(settled)
        for kind in ("raised", "ended"):
            told = {rank: status for rank, status in statuses.items() if status.state == kind}
            if told:
                return _verdict(kind, told)
        silent = {rank: status for rank, status in statuses.items() if status.beat == first[rank].beat}
        if time.monotonic() - started > MISSED_BEATS * PERIOD:
            return _verdict_on_silence(heartbeat, statuses, silent)
        time.sleep(PERIOD / 4)


def _verdict_on_silence(heartbeat: Heartbeat, statuses: Mapping[int, RankStatus], silent: Mapping[int, RankStatus]) -> dict[str, str]:
    """The verdict if no rank reports a failure: blames silent ranks, else those with the least progress."""
    if silent:
        return _verdict("silent", silent)
    coming = {rank: status for rank, status in statuses.items() if status.state != "cut off"}
    if not coming:
        return _verdict("nobody", {})
    least = min(status.progress for status in coming.values())
    return _verdict("behind", {rank: status for rank, status in coming.items() if status.progress == least})


def _verdict(kind: str, statuses: Mapping[int, RankStatus]) -> dict[str, str]:
    who, many = name_ranks(statuses), len(statuses) > 1
    message = next((status.message for status in statuses.values() if status.message), "")
    place = next((f"in {status.place}" for status in statuses.values() if status.place), "outside of all programs")
    what = {
        "raised": f"{who} raised {message}",
        "ended": f"{who} {'have' if many else 'has'} ended{f' with {message}' if message else ''}",
        "silent": f"{who} {'give' if many else 'gives'} no sign of life: killed, stopped, or out of reach",
        "behind": f"{who} did not come, though {'they are' if many else 'it is'} alive",
        "nobody": "a connection between ranks was lost, though all of them are alive",
    }[kind]
    return {"kind": kind, "what": what, "where": f"{who} {'were' if many else 'was'} last seen {place}" if statuses else ""}


def _abort_stuck_collective(heartbeat: Heartbeat, ranks: Sequence[int], activity: Activity) -> None:
    """Frees a rank from a collective that its backend does not end: aborts the groups; ends the process if that does not help."""
    seen = heartbeat.calls, activity.issued()
    try:
        lost = blame(heartbeat, ranks)["kind"] in ("raised", "silent")
    except RuntimeError:
        lost = True  # no store
    if not lost:
        return  # as far as one can tell, a long computation on this rank
    error = fault_of(heartbeat, activity, ranks)
    for group in activity.groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    until = time.monotonic() + GRACE
    while (heartbeat.calls, activity.issued()) == seen and heartbeat.activity is activity:
        if time.monotonic() > until:
            print(f"{error}\nfxshard: the collective cannot be ended, this process ends", file=sys.stderr, flush=True)
            os.abort()
        time.sleep(0.1)
