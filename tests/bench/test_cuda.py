"""The bench of machine code without a GPU: its families exist, and others are refused before anything is compiled."""

from __future__ import annotations

import pytest

from bench.cuda import DEFAULT, main
from bench.families import BY_NAME


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(DEFAULT) == 8 and set(DEFAULT) <= set(BY_NAME)
    with pytest.raises(SystemExit):
        main(["perceptron", "lstm"])
    assert "there is no family 'lstm'" in capsys.readouterr().err
