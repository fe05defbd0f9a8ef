"""Layers that are alike are traced once: what ``trace`` asks of ``shorten`` and ``unroll``, and what it says where they find none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import fx, nn

from fxshard._torch_compat.dynamo.repeats import Repeats, repeats_of
from fxshard.errors import FxshardError
from fxshard.passes.trace.repeats.shorten import Shortened, candidates, label, shorten
from fxshard.passes.trace.repeats.unroll import unroll

log = logging.getLogger("fxshard")
T = TypeVar("T")


class RepeatedLayers:
    """One capture of a model: its rows of alike layers, from the call in Dynamo to the graph of forward and backward.

    ``wanted``: False to trace every layer on its own.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.repeats = Repeats()
        self.shortened: Shortened | None = None

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """While Dynamo captures ``model``: calls of layers that are alike one before are noted in the graph, not traced."""
        found = candidates(model) if self.wanted else {}
        with repeats_of(found) if found else contextlib.nullcontext(self.repeats) as self.repeats:
            yield
        for why in dict.fromkeys(reason.partition(": ")[2] for reason in self.repeats.refused):
            first = next(r for r in self.repeats.refused if r.endswith(why))
            log.info("%s is traced on its own though others look alike: %s", first.partition(": ")[0], why)

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
    """What ``capture`` gives with layers that are alike traced once; each on its own where that fails; at last with torch functions
    spelled out that look at data. Its arguments: whether to spell, and the layers. Raises what the second of these raised."""
    if len(candidates(model)):
        layers = RepeatedLayers()
        try:
            return capture(False, layers)
        except Exception as error:
            log.info("%s is traced layer by layer: %s", type(model).__name__, next(iter(str(error).splitlines()), type(error).__name__))
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
        log.info("%s is traced with torch functions that look at data spelled out, see %s", type(model).__name__, where)
        return made
