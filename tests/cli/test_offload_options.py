"""--offload and --regret on the command line are checked before a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR

FACTORY = "import torch\ndef training():\n    return torch.nn.Linear(4, 4), (torch.randn(4, 4),)\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(FACTORY)
    return f"{tmp_path / 'small.py'}:training"


def test_offload_needs_a_limit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", model, "--mesh", "dp=2", "--offload", "optimizer"]) == USER_ERROR
    said = capsys.readouterr()
    assert "--offload has no effect without a memory limit" in said.err and said.out == ""


@pytest.mark.parametrize("given", ["-3", "0", "10", "30%", "nan"])
def test_an_unreadable_regret_says_what_to_write(model: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", model, "--mesh", "dp=2", f"--regret={given}"])
    said = capsys.readouterr()
    assert ended.value.code == USER_ERROR and "like 0.3" in said.err and said.out == ""
