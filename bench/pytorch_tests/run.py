"""Runs each test of a file of PyTorch twice, in processes of its own, and prints which pass with torch's backends and with fxshard."""

from __future__ import annotations

import argparse
import inspect
import json
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

from bench.pytorch_tests.adapted import WAYS, adapt, load

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
    every = [(name, _of_torchs_graphs(test)) for name, test in _tests(load(options.file), options.k)]
    names, ways = [name for name, reason in every if reason is None], options.ways.split(",")
    found = {way: _run(names, way, options) for way in ways}
    rows = []
    for name in names:
        of_test = [found[way][name] for way in ways]
        said = next((o.said for o in reversed(of_test) if o.outcome != "passes"), "")
        rows.append((name, *(o.outcome for o in of_test), said[:160]))
        if options.verbose:
            print(*(f"{name}, {way}:\n{o.text}" for way, o in zip(ways, of_test, strict=True) if o.text), sep="\n")
    print(tabulate(rows, headers=("test", *ways, "first line of the error"), tablefmt="github"))
    for place, way in enumerate(ways, 1):
        print(f"{way}: " + ", ".join(f"{count} {outcome}" for outcome, count in Counter(row[place] for row in rows).items()))
    apart = [(name, reason) for name, reason in every if reason is not None]
    if apart:
        print("\n" + tabulate(apart, headers=("not run", "why"), tablefmt="github"))
    return int(any(row[1:3] == ("passes", "fails") for row in rows))


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


def _run(names: Sequence[str], way: str, options: argparse.Namespace) -> dict[str, Outcome]:
    """The outcome of each test, in processes of its own; of several ranks, that of the first that fails."""
    ranks, found = range(options.ranks), {}
    output = None if options.verbose else subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as folder:
        given = options.file, way, options.compiler, str(options.limit), folder, str(options.ranks)
        command = [sys.executable, "-m", "bench.pytorch_tests.one_way", *given]
        started = [subprocess.Popen([*command, str(r), *names], stdout=output, stderr=output) for r in ranks]
        for process in started:
            process.wait()
        for name in names:
            of_ranks = [Outcome(**json.loads(Path(folder, f"{name}.{rank}.json").read_text())) for rank in ranks]
            found[name] = next((one for one in of_ranks if one.outcome != "passes"), of_ranks[0])
    return found
