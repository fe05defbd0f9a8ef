"""Runs each test of a file of PyTorch twice, in processes of its own, and prints which pass with torch's backends and with fxshard."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.pytorch_tests.adapted import FAKE_RANKS, WAYS, adapt, load

OF_TORCHS_GRAPHS = {
    r"FileCheck|run_and_get_(triton_)?code": "reads Inductor's code",
    r"assertExpectedInline": "reads the graph of torch's backend",
    r"invoke_subgraph": "about torch's backend invoke_subgraph",
    r"torch\.export": "about torch.export",
}
"""By a pattern in a test's source: why its assertions are not about a backend in general."""


@dataclass(frozen=True)
class Outcome:
    outcome: str
    said: str = ""
    text: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a test passes with torch's backends and fails with fxshard."""
    parser = argparse.ArgumentParser(prog="python -m bench.pytorch_tests", description=__doc__)
    parser.add_argument("file", help="a test file of PyTorch, outside of this repository")
    parser.add_argument("-k", help="only tests whose name matches this regular expression")
    parser.add_argument("--compiler", default="eager", help="of fxshard: eager or inductor")
    parser.add_argument("--ranks", type=int, default=1, help="run tests of a fake process group of this size on so many gloo processes")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--limit", type=float, default=240, help="time limit of a test, in seconds")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of each failure")
    options = parser.parse_args(arguments)
    adapt("torch", options.compiler)
    rows, apart, lost = [], [], 0
    for name, test in _tests(load(options.file), options.k):
        reason = _of_torchs_graphs(test)
        if reason is not None:
            apart.append((name, reason))
            continue
        found = {way: _run(name, way, options) for way in options.ways.split(",")}
        ours = found.get("fxshard", Outcome(""))
        lost += ours.outcome != "passes" and all(o.outcome == "passes" for way, o in found.items() if way == "torch")
        said = next((o.said for o in reversed(found.values()) if o.outcome != "passes"), "")
        rows.append((name, *(o.outcome for o in found.values()), said[:160]))
        print(*rows[-1], sep="  ", flush=True)
        if options.verbose:
            print(*(o.text for o in found.values()), sep="\n", flush=True)
    print("\n" + tabulate(rows, headers=("test", *options.ways.split(","), "first line of the error"), tablefmt="github"))
    for place, way in enumerate(options.ways.split(","), 1):
        print(f"{way}: " + ", ".join(f"{count} {outcome}" for outcome, count in Counter(row[place] for row in rows).items()))
    if apart:
        print("\n" + tabulate(apart, headers=("not run", "why"), tablefmt="github"))
    return int(lost > 0)


def _tests(module: Any, pattern: str | None) -> Iterator[tuple[str, Any]]:
    """(name, class and method) of each test of a module."""
    suites = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        suite = suites.pop(0)
        if isinstance(suite, unittest.TestSuite):
            suites[:0] = list(suite)
            continue
        name = ".".join(suite.id().split(".")[-2:])
        if pattern is None or re.search(pattern, name):
            yield name, suite


def _of_torchs_graphs(test: unittest.TestCase) -> str | None:
    """Why a test is about torch's own graphs, by its source and that of the helpers that it calls; None if it is not."""
    cls, name = type(test), test.id().split(".")[-1]
    method = inspect.unwrap(getattr(cls, name))
    source = inspect.getsource(method)
    for helper in re.findall(r"self\.(_test\w+)\(", source):
        source += inspect.getsource(inspect.unwrap(getattr(cls, helper)))
    return next((reason for pattern, reason in OF_TORCHS_GRAPHS.items() if re.search(pattern, source)), None)


def _run(name: str, way: str, options: argparse.Namespace) -> Outcome:
    """The outcome of a test in processes of its own; that of the first rank that fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(options.ranks):
            result = Path(folder) / f"{rank}.json"
            command = [sys.executable, "-m", "bench.pytorch_tests.one", options.file, name, way, options.compiler, str(result)]
            values = (str(rank), str(options.ranks), f"{folder}/store") if options.ranks > 1 else ("", "", "")
            environment = {**os.environ, **dict(zip(FAKE_RANKS, values, strict=True))}
            output = subprocess.DEVNULL if not options.verbose else None
            started.append((result, subprocess.Popen(command, env=environment, stdout=output, stderr=output)))
        found = [_outcome(result, process, options.limit) for result, process in started]
    return next((one for one in found if one.outcome != "passes"), found[0])


def _outcome(result: Path, process: subprocess.Popen[bytes], limit: float) -> Outcome:
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Outcome("fails", "stopped at the time limit")
    if not result.exists():
        return Outcome("fails", f"the process died ({process.returncode})")
    return Outcome(**json.loads(result.read_text()))
