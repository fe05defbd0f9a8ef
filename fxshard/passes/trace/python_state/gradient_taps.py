"""Makes the gradients at submodules with backward hooks outputs of the program's backward.

A tap is a graph input that is zero. One is added to each tensor that enters or leaves such a module and requires a gradient. The tap's
gradient equals the tensor's, so the caller passes zeros and then calls the hooks with the taps' gradients. A first trace finds the number
and shapes of the taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat.dynamo.hooks import FORWARD, FORWARD_PRE, Hook, is_capturing, while_capturing, while_capturing_tensor
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import TappedCall
from fxshard.passes.trace.fakes.symbols import Symbols

TAPS = "fxshard_taps"
"""The name of the keyword argument that passes the taps while a model is captured."""
Kind = tuple[tuple[Any, ...], torch.dtype]
"""The shape and dtype of a tap; a dynamic size is given by the name of its dim."""


def tap_name(index: int) -> str:
    """The name of a tap among the graph's inputs."""
    return f"taps[{index}]"


class _Call:
    """A ``TappedCall`` while it is captured. ``sides``: the taps of its arguments and of its results."""

    def __init__(self, module: str, begins: int) -> None:
        self.module, self.begins, self.ends = module, begins, begins
        self.sides: tuple[list[int | None], list[int | None]] = ([], [])


class Taps:
    """The taps of one trace. ``known``: their shapes and dtypes, as found by the previous attempt."""

    def __init__(self) -> None:
        self.known: list[Kind] = []
        self.queue: list[torch.Tensor] = []
        self.restart()

    def restart(self) -> None:
        self.kinds: list[Kind] = []
        self.calls: list[_Call] = []
        self.open: list[_Call] = []
        self.events = 0
        self.unfit: list[str] = []

    def settled(self) -> bool:
        """Whether the attempt had all its taps. Raises TraceError for a module whose result or sizes do not allow a tap."""
        if self.unfit:
            what = f"{self.unfit[0]} has a backward hook that torch would not call: it returns neither a tensor nor a tuple of tensors"
            raise TraceError(what, where=self.unfit[0], remedy="return a tensor or a tuple, or remove the hook")
        other = next((size for shape, _ in self.kinds for size in shape if not isinstance(size, (int, str))), None)
        if other is not None:
            what = f"a module with a backward hook takes or returns a tensor whose size is computed from others ({other})"
            raise TraceError(what, where=self.calls[0].module, remedy="remove the hook, or leave sizes static (dynamic=False)")
        known, self.known = self.known, self.kinds
        return known == self.kinds

    def name_sizes(self, name_of: Callable[[Any], Any]) -> None:
        """Replaces dynamic sizes by their names, once Dynamo has captured. ``name_of``: ``Symbols.name_of``."""
        self.kinds = [(tuple(map(name_of, shape)), dtype) for shape, dtype in self.kinds]

    def inputs(self, mode: FakeTensorMode, symbols: Symbols) -> list[torch.Tensor]:
        with mode:
            shapes = [[symbols.size(n) if isinstance(n, str) else n for n in shape] for shape, _ in self.known]
            return [torch.empty(shape, dtype=dtype, requires_grad=True) for shape, (_, dtype) in zip(shapes, self.known, strict=True)]

    @property
    def tapped(self) -> tuple[TappedCall, ...]:
        return tuple(TappedCall(c.module, tuple(c.sides[0]), tuple(c.sides[1]), c.begins, c.ends) for c in self.calls)

    def hooks(self, name: str) -> tuple[Hook, Hook]:
        """The two hooks that add taps to a module's arguments and results; they run after its own forward hooks of the same kind."""
        begins, ends = while_capturing(lambda: self._begin(name)), while_capturing(self._end)
        unfit = while_capturing(lambda: self.unfit.append(name))
        sides = [(while_capturing_tensor(self._noting(side)), while_capturing(self._passing(side))) for side in (0, 1)]
        queue, known = self.queue, bool(self.known)

        def tap(value: Any, side: int) -> Any:
            notes, passes = sides[side]
            if isinstance(value, torch.Tensor) and value.requires_grad:
                notes(value)
                return value + queue.pop(0) if known else value
            passes()
            return value

        def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if not is_capturing():
                return None
            begins()
            return tuple([tap(value, 0) for value in args])

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not is_capturing():
                return None
            if isinstance(out, torch.Tensor):
                result: Any = tap(out, 1)
            elif isinstance(out, tuple):
                result = tuple([tap(value, 1) for value in out])
            else:
                unfit()
                result = out
            ends()
            return result

        return Hook(FORWARD_PRE, -1, before), Hook(FORWARD, -1, after)

    def _begin(self, name: str) -> None:
        self.calls.append(_Call(name, self._next()))
        self.open.append(self.calls[-1])

    def _end(self) -> None:
        self.open.pop().ends = self._next()

    def _next(self) -> int:
        self.events += 1
        return self.events

    def _noting(self, side: int) -> Any:
        def note(value: torch.Tensor) -> None:
            self.open[-1].sides[side].append(len(self.kinds))
            self.kinds.append((tuple(value.shape), value.dtype))

        return note

    def _passing(self, side: int) -> Any:
        return lambda: self.open[-1].sides[side].append(None)
