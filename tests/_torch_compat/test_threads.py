"""Functions of torch that are replaced while sizes are symbolic: one thread at a time may do so, and they are restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from torch._inductor import ir
from torch._subclasses import fake_impls
from torch.fx.experimental.sym_node import SymNode

from fxshard._torch_compat.inductor import inductor
from fxshard._torch_compat.sizes.symbols import SymbolEnv, oblivious

REPLACED: list[tuple[Any, str]] = [(SymNode, "has_hint"), (fake_impls, "_compute_stride"), (ir, "argsort_sym")]


def compiling() -> AbstractContextManager[None]:
    return inductor.any_size(SymbolEnv().shape_env)


@pytest.mark.parametrize("first, second", [(oblivious, oblivious), (compiling, compiling), (oblivious, compiling)])
def test_the_second_thread_waits_for_the_first(
    first: Callable[[], AbstractContextManager[None]], second: Callable[[], AbstractContextManager[None]]
) -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with second():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with first():
        with first():  # the same thread may enter again
            thread.start()
        assert not entered.wait(0.5)
    assert entered.wait(30)
    leave.set()
    thread.join(30)
    assert [getattr(owner, name) for owner, name in REPLACED] == before
