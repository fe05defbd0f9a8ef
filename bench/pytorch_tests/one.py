"""Runs one test: ``python -m bench.pytorch_tests.one FILE CLASS.TEST WAY COMPILER RESULT``. Its processes import this module as well."""

from __future__ import annotations

import json
import re
import sys
import unittest
from pathlib import Path

from bench.pytorch_tests.adapted import adapt, load

ERROR = re.compile(r"^(?:E\s+)?[\w.]*(?:Error|Exception|Unsupported|Exit|Failure)\b.*")
FILE, TEST, WAY, COMPILER, RESULT = sys.argv[1:6]
adapt(WAY, COMPILER)


def main() -> None:
    module = load(FILE)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(TEST, module).run(result)
    bad = [*result.errors, *result.failures]
    text = bad[0][1] if bad else ""
    outcome = "fails" if bad else "skipped" if result.skipped else "passes"
    said = first_line(text) if bad else "".join(reason for _, reason in result.skipped)
    Path(RESULT).write_text(json.dumps({"outcome": outcome, "said": said, "text": text}))


def first_line(text: str) -> str:
    """The first line of the error that a traceback ends with; for a test of several processes, of the first process's error."""
    _, *inner = text.split("exited with error code")
    found = [line for line in (inner or [text])[0].splitlines() if ERROR.match(line)]
    return found[-1].strip() if found else "no error was printed"


if __name__ == "__main__":
    main()
