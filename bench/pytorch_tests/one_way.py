"""Runs tests, each in a process of its own: ``python -m bench.pytorch_tests.one_way FILE WAY COMPILER LIMIT FOLDER RANKS RANK TEST...``.

The outcome of a test is a JSON file in the folder.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import unittest
from pathlib import Path
from types import ModuleType

from bench.pytorch_tests.adapted import adapt, load, replace_fake_groups

ERROR = re.compile(r"^(?:E\s+)?[\w.]*(?:Error|Exception|Unsupported|Exit|Failure)\b.*")


def main() -> None:
    file, way, compiler, limit, folder, ranks, rank, *tests = sys.argv[1:]
    adapt(way, compiler)
    module = load(file)
    for test in tests:
        if int(ranks) > 1:
            replace_fake_groups(int(rank), int(ranks), f"{folder}/{test}.store")
        result = Path(folder) / f"{test}.{rank}.json"
        process = multiprocessing.get_context("fork").Process(target=run, args=(module, test, result))
        process.start()
        process.join(float(limit))
        if process.is_alive():
            process.kill()
            process.join()
            _write(result, "fails", "stopped at the time limit")
        elif not result.exists():
            _write(result, "fails", f"the process died ({process.exitcode})")


def run(module: ModuleType, test: str, path: Path) -> None:
    """Runs one test of a module and writes its outcome."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(test, module).run(result)
    bad = [*result.errors, *result.failures]
    if bad:
        _write(path, "fails", first_line(bad[0][1]), bad[0][1])
    elif result.skipped:
        _write(path, "skipped", result.skipped[0][1])
    else:
        _write(path, "passes")


def first_line(text: str) -> str:
    """The first line of the error that a traceback ends with; for a test of several processes, of the first process's error."""
    _, *inner = text.split("exited with error code")
    found = [line for line in (inner or [text])[0].splitlines() if ERROR.match(line)]
    return found[-1].strip() if found else "no error was printed"


def _write(path: Path, outcome: str, said: str = "", text: str = "") -> None:
    path.write_text(json.dumps({"outcome": outcome, "said": said, "text": text}))


if __name__ == "__main__":
    main()
