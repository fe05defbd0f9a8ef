"""A measurement in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_fresh_process(job: Callable[..., Any], *given: Any) -> Any:
    """The result of ``job(*given)``, in a fresh process, so that measurements do not affect each other."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        return pool.submit(job, *given).result()
