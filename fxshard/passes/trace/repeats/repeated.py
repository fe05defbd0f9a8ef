"""Traces repeated layers once: the interface of ``shorten`` and ``unroll`` for ``trace``, and the fallback if they fail."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import fx, nn

from fxshard._torch_compat.dynamo.repeats import Repeats, repeats_of
from fxshard.errors import FxshardError
from fxshard.passes.trace.repeats.shorten import NotAlike, Shortened, candidates, label, shorten
from fxshard.passes.trace.repeats.unroll import unroll

log = logging.getLogger("fxshard")
T = TypeVar("T")


class RepeatedLayers:
    """The repeated layers of one capture, from Dynamo to the joint graph.

    ``wanted``: False to trace every layer separately.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.repeats = Repeats()
        self.shortened: Shortened | None = None

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """While Dynamo captures ``model``: calls of layers that repeat an earlier one become stubs in the graph and are not traced."""
        found = candidates(model) if self.wanted else {}
        with repeats_of(found) if found else contextlib.nullcontext(self.repeats) as self.repeats:
            yield
        for why in dict.fromkeys(reason.partition(": ")[2] for reason in self.repeats.refused):
            first = next(r for r in self.repeats.refused if r.endswith(why))
            log.info("%s is traced separately although it looks like other layers: %s", first.partition(": ")[0], why)

    def shorten(self, captured: fx.GraphModule, model: nn.Module) -> None:
        if any(one.calls for one in self.repeats.traced):
            self.shortened = shorten(captured, model, self.repeats)

    def label(self, captured: fx.GraphModule) -> None:
        if self.shortened is not None:
            label(captured, self.shortened)

    def unroll(self, joint: fx.GraphModule) -> None:
        if self.shortened is not None:
            unroll(joint, self.shortened)
            rows = ", ".join(f"{row.modules[0]} to {row.modules[-1]}" for row in self.shortened.rows)
            log.info("layers that are alike were traced as four: %s", rows)


def first_that_works(model: nn.Module, capture: Callable[[bool, RepeatedLayers], T]) -> T:
    """The result of the first attempt that succeeds: repeated layers traced once; every layer separately; every layer separately, with
    data-dependent torch functions replaced. ``capture`` takes (whether to replace these functions, the layers). If all fail, raises the
    error of the second attempt."""
    if len(candidates(model)):
        layers = RepeatedLayers()
        try:
            return capture(False, layers)
        except Exception as error:
            expected = isinstance(error, NotAlike | FxshardError)  # any other is a fault of the shortcut, not to be overlooked
            said = next(iter(str(error).splitlines()), type(error).__name__)
            log.log(logging.INFO if expected else logging.WARNING, "%s is traced layer by layer: %s", type(model).__name__, said)
    try:
        return capture(False, RepeatedLayers(False))
    except FxshardError:
        raise
    except Exception as error:
        try:
            made = capture(True, RepeatedLayers(False))
        except Exception:
            raise error from None
        where = "fxshard/passes/trace/functions/data_dependent.py"
        log.info("%s is traced with replacements for torch functions that branch on data, see %s", type(model).__name__, where)
        return made
