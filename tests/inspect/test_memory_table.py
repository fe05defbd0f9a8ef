"""The table of memory over time, as a golden text; for a plan alone the command asks for a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from fxshard import inspect
from fxshard.cli.main import main
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from tests.plans.small_plans import small_plan


def profile() -> MemoryProfile:
    tensors = (
        HeldTensor("lin.weight", "parameter", 128, (8, 4), "torch.float32", 0, 2, "RS(0)"),
        HeldTensor("x", "gathered", 4096, (32, 32), "torch.float32", 0, 1, "RR", "model.py:7: y = x @ w"),
        HeldTensor("outputs[0]", "output", 512, (128,), "torch.float32", 1, 2, "S(0)R"),
    )
    steps = (
        StepRun("x", "all_gather tp"),
        StepRun("mm", "aten.mm.default", "model.py:7: y = x @ w", 64),
        StepRun("add", "aten.add.Tensor"),
    )
    return MemoryProfile(tensors, steps, {"optimizer": 256}, ("nonzero",))


def test_a_profile() -> None:
    assert_expected_inline(
        inspect.memory_table(profile(), shown=2),
        """\
peak per device  5.06 KB (5,056 bytes)
at               mm (aten.mm.default)
source           model.py:7: y = x @ w
not counted      nonzero: only running tells their size

at the peak        bytes    share
-------------  ---------  -------
parameter      128 bytes     2.5%
optimizer      256 bytes     5.1%
output         512 bytes    10.1%
gathered         4.10 KB    81.0%
temporary       64 bytes     1.3%

all: dtype float32
tensor      kind          bytes  layout    shape    source
----------  --------  ---------  --------  -------  ---------------------
x           gathered    4.10 KB  RR        32x32    model.py:7: y = x @ w
outputs[0]  output    512 bytes  S(0)R     128

steps        bytes  over time                         source
-------  ---------  --------------------------------  ---------------------
0-0        4.48 KB  ############################
1-1        5.06 KB  ################################  model.py:7: y = x @ w
2-2      896 bytes  ######""",
    )


def test_a_plan_alone_has_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_plan().save(tmp_path / "plan.json")
    assert main(["inspect", str(tmp_path / "plan.json"), "--memory"]) == 0
    said = capsys.readouterr().out
    assert "64 bytes   100.0%" in said and "over time and tensor by tensor: fxshard plan FILE.py:FACTORY --memory" in said
