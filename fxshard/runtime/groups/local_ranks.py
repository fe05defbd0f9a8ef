"""Waits for ranks that one of fxshard's commands started as processes on this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from fxshard.errors import RunError
from fxshard.progress import child_processes_show


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], seconds: float, remedy: str) -> None:
    """Waits until all ranks have succeeded; if one fails or ``seconds`` pass, kills the others and raises RunError."""
    until = time.monotonic() + seconds
    try:
        with child_processes_show():
            while set(codes := [r.poll() for r in ranks]) != {0}:
                failed = [i for i, code in enumerate(codes) if code]
                if failed or time.monotonic() > until:
                    what = f"rank {failed[0]} failed" if failed else f"the ranks were not done after {seconds:g} seconds"
                    raise RunError(what, remedy=f"its message is above; {remedy}")
                time.sleep(0.05)
    finally:
        for r in ranks:
            r.kill()
