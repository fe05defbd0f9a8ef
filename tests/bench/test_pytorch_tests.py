"""The runner of PyTorch's tests, on a file with one test for each verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.pytorch_tests.one_way import first_line
from bench.pytorch_tests.run import main

FILE = """
import torch, torch._dynamo.testing
from torch.testing import FileCheck
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore

class Tests(TestCase):
    def setUp(self):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)

    def test_counted(self):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(torch.sin, backend=counter)
        self.assertEqual(compiled(torch.ones(2)), torch.sin(torch.ones(2)))
        self.assertEqual(counter.frame_count, 1)

    def test_fails(self):
        raise ValueError("as it should")

    def test_reads_code(self):
        FileCheck().check("def").run("def")

    def test_name_of_backend(self):
        names = []
        torch.compile(torch.sin, backend=lambda graph, inputs: names.append("theirs") or graph)(torch.ones(2))
        self.assertEqual(names, ["theirs"])
"""


@pytest.mark.slow
def test_verdicts(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_of_torch_in_a_file.py"
    file.write_text(FILE)
    monkeypatch.setattr("bench.pytorch_tests.run.adapt", lambda way, compiler: None)  # this process keeps its torch
    monkeypatch.syspath_prepend(tmp_path)
    assert main([str(file)]) == 1  # a test passes with torch's backend only
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capfd.readouterr().out.splitlines()]
    rows = {name: cells for name, *cells in lines}
    assert rows["Tests.test_counted"] == ["passes", "passes", ""]
    assert rows["Tests.test_fails"] == ["fails", "fails", "ValueError: as it should"]
    assert rows["Tests.test_name_of_backend"][:2] == ["passes", "fails"]
    assert rows["Tests.test_reads_code"] == ["reads Inductor's code"]


def test_the_error_of_a_test_of_several_processes_is_that_of_the_first() -> None:
    first = "RuntimeError: Process 0 exited with error code 10\nKeyError: 1\nfxshard.errors.PlanError: no"
    text = f"{first}\nProcess 1 exited with error code 10\nOSError: 2"
    assert first_line(text) == "fxshard.errors.PlanError: no"
