"""Agreement among ranks: each sends a note, the lowest rank decides, and all get the same outcome or error.

It uses the store of the default process group and no collective, so it works before the first one. Keys are under ``fxshard/<ranks>/``,
where <n> counts the meetings of these ranks:

    uses/<rank>       number of meetings that the rank has entered: its next <n>; never deleted
    <n>/from/<rank>   topic and note of the rank: it has arrived
    <n>/decided       a counter: whoever increments it first may write the outcome, a result or an error
    <n>/part/<i>      the result, compressed, in pieces
    <n>/outcome       JSON: the number of pieces, or the error
    <n>/read/<rank>   the rank has read the outcome

A rank that times out settles the meeting with an error, so no rank accepts a result that another rank has given up on. The lowest rank
deletes the keys once all have read the outcome. If a rank is missing, the keys stay, so that it learns of the outcome when it arrives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from fxshard.errors import FxshardError, OptionError, RunError
from fxshard.text_table import number_runs

PIECE = 1 << 20  # bytes in one value of the store; a TCPStore takes up to 8 MiB
GRACE = 10.0  # seconds for steps that do not wait for user code: writing or reading an announced outcome
TIMEOUT = 300.0
OTHER_CALL = (
    "run the same program on all ranks: the same models and graphs, called in the same order. Under torch.compile, a rank whose shard has "
    "one row, or none, captures the function again by itself: pad the rows to two or more on each rank, or compile with dynamic=False"
)
MISSING = "look for an earlier error in the output of the missing ranks; if they are only slow, raise timeout (seconds)"
UNFINISHED = "raise timeout (seconds, planning included), or plan ahead (`fxshard plan ... -o plan.json`) and pass plan="
STORE_LOST_REMEDY = "look for the first error among all ranks: the process that holds the store (rank 0, or torchrun's agent) has ended"


@dataclass(frozen=True)
class Group:
    """The ranks that must agree, sorted; ``rank`` is this one, ``store`` a c10d Store that all of them reach."""

    store: Any
    rank: int
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.ranks[0]


def default_group(ranks: Sequence[int] | None = None) -> Group | None:
    """``ranks`` (global; default: all) of the default process group; None if this process is alone.

    Alone means no process group, one rank, or torch's ``fake`` backend, whose other ranks do not exist. Raises OptionError for ranks that
    the process group does not have, RunError if this rank is not among them.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    size, rank = dist.get_world_size(), dist.get_rank()
    chosen = tuple(sorted(range(size) if ranks is None else ranks))
    if len(set(chosen)) != len(chosen) or not chosen or chosen[0] < 0 or chosen[-1] >= size:
        raise OptionError(f"{list(chosen)} are not ranks of a process group of {size}", remedy=f"give different ranks from 0 to {size - 1}")
    if rank not in chosen:
        raise RunError(f"rank {rank} is not among {name_ranks(chosen)}", remedy="call this on the ranks of the mesh only")
    return Group(dist.group.WORLD.get_group_store(), rank, chosen) if len(chosen) > 1 else None


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 0-3, 5``."""
    text = ", ".join(number_runs(ranks))
    return f"rank{'' if text.isdecimal() else 's'} {text}"


def told_to_all(error: BaseException, group: Group) -> bool:
    """Whether all ranks of ``group`` raise ``error``, because it left or came from a meeting of them or of more ranks."""
    return set(group.ranks) <= getattr(error, _TOLD, frozenset())


def _mark(error: BaseException, group: Group) -> None:
    with contextlib.suppress(AttributeError):
        setattr(error, _TOLD, getattr(error, _TOLD, frozenset()) | set(group.ranks))


_TOLD = "fxshard_told_to_ranks"


class Meeting:
    """One agreement of a group, as a context manager; an exception that leaves the block is raised on all other ranks too.

        with Meeting(group, "share the plan", timeout=300.0) as meeting:
            if meeting.leads:
                text = work()
                meeting.everyone()
                meeting.decide(text)
            else:
                text = meeting.outcome()

    ``topic``: what the ranks do here, as in "rank 1 did not come to <topic>"; different topics are an error. ``brings``: this rank's note.
    ``timeout``: seconds from entering until this rank gives up, plus at most 10 while the others read. ``work``: what the leader does in
    the block, as in "rank 0 could not <work>"; by default ``topic``. Raises RunError, with the same text on all ranks, if ranks are
    missing or differ in topic.
    """

    def __init__(self, group: Group, topic: str, brings: str = "", timeout: float = TIMEOUT, work: str = "") -> None:
        self._group, self._topic, self._brings, self._timeout = group, topic, brings, timeout
        self._work = work if work and self.leads else topic
        self._base = f"fxshard/{_digest(group.ranks)}"
        self._known = self._lost = False

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._group.rank == self._group.leader

    def __enter__(self) -> Meeting:
        self._deadline = time.monotonic() + self._timeout
        with self._store() as store:
            number = store.add(f"{self._base}/uses/{self._group.rank}", 1)
        self._base = f"{self._base}/{number}"
        self._set(f"from/{self._group.rank}", json.dumps([self._topic, self._brings]).encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _mark(error, self._group)
        if error is not None and not self._known and not self._lost:
            with contextlib.suppress(RunError):  # our error, or that of a rank that settled first
                self._settle(error=self._failure(error))
                self._read()
        if self.leads and not self._lost:
            with contextlib.suppress(RunError):
                self._clear()

    def everyone(self) -> dict[int, str]:
        """Waits for all ranks and returns their notes. Leader only. Raises RunError if ranks are missing or came for another topic."""
        arrivals = [f"from/{rank}" for rank in self._group.ranks]
        self._poll(lambda: self._has("outcome") or self._has(*arrivals), self._deadline)
        if self._has("outcome"):
            self._refuse(None)
        if self._absent():
            self._refuse(self._timeout_error())
        came = {rank: json.loads(self._get(f"from/{rank}")) for rank in self._group.ranks}
        topics = {topic for topic, _ in came.values()}
        if len(topics) > 1:
            self._refuse(self._differing_topics({rank: topic for rank, (topic, _) in came.items()}))
        return {rank: note for rank, (_, note) in came.items()}

    def decide(self, text: str = "") -> None:
        """Sends ``text`` to all ranks. Leader only. Raises RunError if another rank has given up."""
        self._settle(text)
        self._read()

    def refuse(self, error: RunError) -> NoReturn:
        """Raises ``error`` on all ranks. Leader only."""
        self._refuse(error)

    def outcome(self) -> str:
        """Waits for the leader's decision. Raises RunError with the leader's error, or naming the missing ranks."""
        if not self._poll(lambda: self._has("outcome"), self._deadline):
            self._settle(error=self._timeout_error())
        return self._read()

    def _settle(self, text: str = "", error: RunError | None = None) -> None:
        """Writes the outcome unless another rank has written one; a result that comes too late is dropped."""
        data = zlib.compress(text.encode(), 1) if error is None else b""
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
        for i, piece in enumerate(pieces):
            self._set(f"part/{i}", piece)
        with self._store() as store:
            first = store.add(f"{self._base}/decided", 1) == 1
        if first:
            value = {"parts": len(pieces)} if error is None else {"what": error.what, "where": error.where, "remedy": error.remedy}
            self._set("outcome", json.dumps(value).encode())
        else:
            self._delete(f"part/{i}" for i in range(len(pieces)))

    def _read(self) -> str:
        if not self._poll(lambda: self._has("outcome"), time.monotonic() + GRACE):
            raise RunError(f"a rank ended while it wrote the outcome of: {self._topic}", where=self._where(), remedy=STORE_LOST_REMEDY)
        value = json.loads(self._get("outcome"))
        data = b"".join(self._get(f"part/{i}") for i in range(value.get("parts", 0)))
        self._set(f"read/{self._group.rank}", b"1")
        self._known = True
        if "what" in value:
            raise RunError(value["what"], where=value["where"], remedy=value["remedy"])
        return zlib.decompress(data).decode()

    def _refuse(self, error: RunError | None) -> NoReturn:
        """Settles with ``error`` (None: already settled) and raises the settled error; only the leader could have settled with a result."""
        if error is not None:
            self._settle(error=error)
        self._read()
        raise AssertionError("a result was settled behind the leader's back")

    def _clear(self) -> None:
        """Waits until the ranks that arrived have read the outcome; deletes the keys if that is all of them."""
        here = set(self._group.ranks) - set(self._absent())
        done = self._poll(lambda: self._has(*(f"read/{rank}" for rank in here)), time.monotonic() + GRACE)
        if done and len(here) == len(self._group.ranks):
            parts = json.loads(self._get("outcome")).get("parts", 0)
            self._delete(f"{kind}/{rank}" for kind in ("from", "read") for rank in self._group.ranks)
            self._delete([*(f"part/{i}" for i in range(parts)), "decided", "outcome"])

    def _absent(self) -> list[int]:
        keys = {rank: f"from/{rank}" for rank in self._group.ranks}
        return [] if self._has(*keys.values()) else [rank for rank, key in keys.items() if not self._has(key)]

    def _failure(self, error: BaseException) -> RunError:
        """What the other ranks raise for ``error`` of this one: its type and first line."""
        name, said = type(error).__name__, _first_line(error.what if isinstance(error, FxshardError) else str(error))
        what = f"{self._own_name()} could not {self._work}: {f'{name}: {said}' if said else name}"
        if not isinstance(error, FxshardError):
            remedy = f"see the output of {self._own_name()}, which has the whole error and its traceback"
            return RunError(what, where=self._where(), remedy=remedy)
        whole = f"{self._own_name()} has the whole error"
        remedy = f"{error.remedy} ({whole})" if error.remedy else whole
        return RunError(what, where=_first_line(error.where or "") or None, remedy=remedy)

    def _timeout_error(self) -> RunError:
        absent, leader = self._absent(), name_ranks([self._group.leader])
        if not absent:
            what = f"{leader} did not {self._topic} within {self._timeout:g} s; all ranks are there"
            return RunError(what, where=self._where(), remedy=UNFINISHED)
        here = name_ranks(set(self._group.ranks) - set(absent))
        what = f"{name_ranks(absent)} did not come to {self._topic} within {self._timeout:g} s; there: {here}"
        return RunError(what, where=self._where(), remedy=MISSING)

    def _differing_topics(self, topics: dict[int, str]) -> RunError:
        groups = {topic: [r for r in topics if topics[r] == topic] for topic in topics.values()}
        said = "; ".join(f"{name_ranks(ranks)} to {topic}" for topic, ranks in groups.items())
        return RunError(f"the ranks came to do different things: {said}", where=self._where(), remedy=OTHER_CALL)

    def _own_name(self) -> str:
        return name_ranks([self._group.rank])

    def _where(self) -> str:
        return f"the process group's store, as seen by {self._own_name()}, of {name_ranks(self._group.ranks)}"

    def _poll(self, ready: Callable[[], bool], until: float) -> bool:
        """Polls until ``ready`` or ``until`` (monotonic seconds), at least once; less often if many ranks share the store.

        Each pause is at most a twentieth of the time waited so far, and so is the delay.
        """
        began, longest = time.monotonic(), 0.05 + 1e-4 * len(self._group.ranks)
        while not ready():
            now = time.monotonic()
            if now >= until:
                return False
            time.sleep(min(max(0.001, (now - began) / 20), longest, until - now))
        return True

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        try:
            yield self._group.store
        except RuntimeError as error:  # torch's DistError and its kinds are RuntimeErrors
            self._lost = True
            what = f"{self._own_name()} lost the process group's store when it was about to {self._topic}: {error}"
            raise RunError(what, where=self._where(), remedy=STORE_LOST_REMEDY) from error

    def _has(self, *keys: str) -> bool:
        with self._store() as store:
            return store.check([f"{self._base}/{key}" for key in keys])

    def _get(self, key: str) -> bytes:
        with self._store() as store:
            return store.get(f"{self._base}/{key}")

    def _set(self, key: str, value: bytes) -> None:
        with self._store() as store:
            store.set(f"{self._base}/{key}", value)

    def _delete(self, keys: Iterable[str]) -> None:
        with self._store() as store:
            for key in keys:
                store.delete_key(f"{self._base}/{key}")


def agree(group: Group, topic: str, note: str, decide: Callable[[dict[int, str]], str | RunError], timeout: float) -> str:
    """What the lowest rank decides from the notes of all, on all ranks; an error that it decides, or raises, is raised on all."""
    with Meeting(group, topic, note, timeout) as meeting:
        if not meeting.leads:
            return meeting.outcome()
        outcome = decide(meeting.everyone())
        if isinstance(outcome, RunError):
            meeting.refuse(outcome)
        meeting.decide(outcome)
        return outcome


def _first_line(text: str) -> str:
    first, _, more = text.strip().partition("\n")
    return f"{first.rstrip()} ..." if more else first


def _digest(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 32 else hashlib.sha256(text.encode()).hexdigest()[:16]
