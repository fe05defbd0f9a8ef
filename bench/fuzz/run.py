"""Runs cases in child processes with limits on time and memory, and collects what went wrong."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.fuzz.subjects import Subject
from fxshard.errors import FxshardError

SECONDS, GROWTH, BATCH, PATIENCE = 5, 2**30, 200, 150
"""Limits of a case: seconds of processor time, and bytes of memory more than before it. Cases in one process. Seconds of wall time after
which a process that does not return from a kernel is ended."""


@dataclass
class Tally:
    """Counts of one kind of file; ``faults``: what was wrong, by the number of the case."""

    cases: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: int = 0
    faults: list[str] = field(default_factory=list)


class Hang(BaseException):
    """A case that ran into its limit; not an Exception, so that no reader takes it for a fault of the file."""


def run_case(subject: Subject, seed: str, folder: Path) -> tuple[bool, str]:
    """(whether the file was refused, what was wrong: "" if nothing)."""
    draw = random.Random(seed)
    files, exact = subject.mutated(draw)
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    refused, wrong = _read(subject, folder, exact)
    if not wrong:
        try:
            wrong = subject.shown(folder / subject.path, refused)
        except (Exception, Hang):
            wrong = "shown: " + _last(traceback.format_exc())
    return refused, wrong


def _read(subject: Subject, folder: Path, exact: bool) -> tuple[bool, str]:
    """The same of the reader alone. ``exact``: what is read must equal the original."""
    try:
        value = subject.read(folder / subject.path)
        found = subject.text(value)  # what is read late is refused late: the files of the ranks
    except FxshardError as error:
        return True, "" if error.what and error.remedy else f"an error without a remedy: {error.what}"
    except (Exception, Hang):
        return True, _last(traceback.format_exc())
    try:
        if exact:
            return False, "" if found == original(subject, folder.parent) else "read without an error, and is another than the original"
        if subject.kind == "checkpoint":  # its readers fill a model: there is nothing to write
            return False, ""
        again = folder / ("again" + "".join(Path(subject.path).suffixes))
        subject.write(value, again)
        return False, "" if subject.text(subject.read(again)) == found else "not the same after it was written and read again"
    except (Exception, Hang):
        return False, "after reading: " + _last(traceback.format_exc())


_ORIGINALS: dict[int, str] = {}


def original(subject: Subject, folder: Path) -> str:
    """The text of the undamaged files."""
    if id(subject) not in _ORIGINALS:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            for file, data in subject.files.items():
                (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(name) / file).write_bytes(data)
            _ORIGINALS[id(subject)] = subject.text(subject.read(Path(name) / subject.path))
    return _ORIGINALS[id(subject)]


def _last(trace: str) -> str:
    lines = trace.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    short = "; ".join(re.sub(r'File "[^"]*/([^"]*)", line', r"\1", place) for place in places[-3:])
    return f"{lines[-1][:200]} ({short})"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raises Hang after SECONDS of this process's time."""

    def stop(*_: object) -> None:
        raise Hang(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def memory(peak: bool) -> int:
    """Bytes of this process: now, or at most since ``forget_peak``."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_here(subjects: list[Subject], first: int, count: int, seed: int, folder: Path, tally: Tally) -> None:
    """Runs cases in this process."""
    for number in range(first, first + count):
        subject = subjects[number % len(subjects)]
        forget_peak()
        before, start = memory(peak=False), time.process_time()
        try:
            with limited():
                refused, wrong = run_case(subject, f"{seed} {subject.kind} {number}", folder / "case")
        except Hang as hang:
            refused, wrong = False, str(hang)
        took, grew = time.process_time() - start, memory(peak=True) - before
        if grew > GROWTH:
            wrong = wrong or f"took {grew / 2**30:.1f} GiB"
        tally.cases += 1
        tally.refused += refused
        tally.slowest, tally.largest = max(tally.slowest, took), max(tally.largest, grew)
        if wrong:
            tally.faults.append(f"{number}: {wrong}")


def run(subjects: list[Subject], count: int, seed: int, first: int = 0) -> Tally:
    """Runs cases ``first`` to ``first + count``, in child processes that a crash or a hang in a kernel ends, without ending this one."""
    tally, number, end = Tally(), first, first + count
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while number < end:
            done = _in_child(subjects, number, min(BATCH, end - number), seed, folder, tally)
            number += done
    return tally


def _in_child(subjects: list[Subject], first: int, count: int, seed: int, folder: Path, tally: Tally) -> int:
    """Runs a batch in a forked process; returns how many cases are done, with one that ended the process."""
    notes, noted = folder / "notes", Tally()
    notes.write_text("")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 3 * GROWTH,) * 2)
            with open(folder / "stderr", "w") as errors, open(notes, "a") as out:
                os.dup2(errors.fileno(), 2)
                for number in range(first, first + count):
                    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=errors)
                    one = Tally()
                    run_here(subjects, number, 1, seed, folder, one)
                    out.write(f"{one.refused}\t{one.slowest}\t{one.largest}\t{''.join(one.faults)!r}\n")
                    out.flush()
            code = 0
        except BaseException:  # a fault of the mutation itself, or no memory for the next case
            (folder / "stderr").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    lines = notes.read_text().splitlines()
    for line in lines:
        refused, took, grew, wrong = line.split("\t")
        noted.refused += int(refused)
        tally.slowest, tally.largest = max(tally.slowest, float(took)), max(tally.largest, int(grew))
        tally.faults += [wrong] if wrong != "''" else []
    done = len(lines)
    if status:
        said = (folder / "stderr").read_text()[-600:]
        tally.faults.append(f"{first + done}: the process ended, status {status}: {said}")
        done += 1
    tally.cases, tally.refused = tally.cases + done, tally.refused + noted.refused
    return done


def _address_space() -> int:
    match = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
