"""Exit codes of the ``fxshard`` command: 2 for an error of the user, 1 for one of fxshard."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

from fxshard.errors import FxshardError

USER_ERROR, FAULT = 2, 1
INTERRUPTED = 130
"""What shells return after Ctrl-C: 128 and the number of the signal."""
FAULT_REMEDY = "This is a fault of fxshard: please report it. With FXSHARD_DUMP=some/folder each stage is written there; send that too."


def ended(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code; prints its errors."""
    try:
        code = command()
        sys.stdout.flush()
    except FxshardError as error:
        if first_to_say(str(error)):
            print(error, file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted; no file was left half written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads us (head, less) has seen enough; what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:
        traceback.print_exc()
        print(f"\n{FAULT_REMEDY}", file=sys.stderr)
        return FAULT
    else:
        return code or 0
    return 0


STORE_PATIENCE = 5.0
"""Seconds to wait for torchrun's store before an error is printed anyway."""


def first_to_say(text: str) -> bool:
    """Whether no other rank has said this: under torchrun, the ranks count in its store, so that an error that all of them raise is
    printed once. True without torchrun, or if its store cannot be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with contextlib.suppress(Exception):
        from torch.distributed import TCPStore

        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(place, port, is_master=False, timeout=timedelta(seconds=STORE_PATIENCE))
        return store.add(f"fxshard/said/{start}/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    return True
