"""What all tests share: one thread per process, reproducible hypothesis runs, the optional benchmark data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples on every run: a failure in CI is a failure on a laptop.
settings.register_profile("fxshard", derandomize=True, deadline=None)
settings.load_profile("fxshard")

_REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with benchmark data that is not part of the repository; tests that need it are skipped without it."""
    folder = Path(os.environ.get("FXSHARD_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}: put it there, or name its folder in FXSHARD_DATA")
    return folder
