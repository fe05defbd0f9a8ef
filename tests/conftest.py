"""Set-up of all tests: one thread per process, reproducible hypothesis runs, the optional benchmark data."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fxshard.strategies import cache_clear
from fxshard.strategies.engine import registry
from tests.rare_collections import collect_rarely

torch.set_num_threads(1)
collect_rarely()
os.environ["FXSHARD_CACHE"] = "0"  # tests and the processes they start neither read the user's cache nor add to it

# The same examples on every run: a failure in CI is a failure on a laptop.
settings.register_profile("fxshard", derandomize=True, deadline=None)
settings.load_profile("fxshard")


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """At the end pytest collects twice, to hear of exceptions in finalizers; after 369 tests that took 14 s."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that start processes first: they are the longest, and one of them at the end would leave other workers idle."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with benchmark data, which is not part of the repository. Tests that need it are skipped without it."""
    folder = os.environ.get("FXSHARD_DATA")
    if folder is None:
        pytest.skip("the published instances are not part of the repository: name their folder in FXSHARD_DATA")
    return Path(folder)


@pytest.fixture
def own_rules() -> Iterator[None]:
    """Removes the rules that the test registers."""
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)
    cache_clear()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Turns the cache on, in a folder of the test, which it returns."""
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
