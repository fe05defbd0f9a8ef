"""The demo succeeds only if the collectives that ran were predicted and the losses are those of one device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxshard.errors import RunError
from fxshard.runtime import demo


def test_the_demo_fails_on_other_collectives_or_losses() -> None:
    judge = demo._judge
    judge({("all_reduce", "tp"): 2}, {("all_reduce", "tp"): 2}, 1e-6, 1e-4)
    with pytest.raises(RunError, match="differ from the prediction"):
        judge({("all_reduce", "tp"): 2}, {("all_reduce", "tp"): 1}, 0.0, 1e-4)
    for difference in (1e-3, float("nan")):
        with pytest.raises(RunError, match="losses differ"):
            judge({}, {}, difference, 1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_whole_demo() -> None:
    done = subprocess.run([sys.executable, "-m", "fxshard", "demo"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("greatest difference of the losses") == 2


def test_json_says_nothing_else_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    with demo._elsewhere():
        print("prose")
    assert capfd.readouterr() == ("", "")
