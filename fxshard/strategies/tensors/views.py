"""Views that split and merge dims: the factors are found from the two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, factors, is_one, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.packed import by_factor
from fxshard.strategies.engine.registry import register


def view(call: Call) -> Factors:
    """Elements keep their order: (a b) c -> a (b c)."""
    ins, outs, sizes = refine(call.operands[0].shape, call.output.shape)
    return factors([ins], [outs], sizes=sizes, linear=linear_groups(call, [(0,)], MOVEMENT))


def refine(source: Sequence[Any], target: Sequence[Any]) -> tuple[list[list[str]], list[list[str]], dict[str, Any]]:
    """Factors of the dims of two shapes of equal numel, outermost first, and their sizes.

    Reads both shapes from the left; the greatest common divisor of the remainders of the two current dims becomes a factor of
    both. If it is 1 (6 4 -> 4 6, after the factor 2), dims stay whole up to the next dim boundary that both shapes
    share.
    """
    sides = (_Side(source, "i"), _Side(target, "o"))
    sizes: dict[str, Any] = {}
    if any(known_equal(s, 0) for s in source):
        return sides[0].rest(), sides[1].rest(), sizes
    while all(side.advance() for side in sides):
        common = _common(sides[0].left, sides[1].left)
        if common is None:
            if not _skip(*sides):
                break
            continue
        name = f"f{len(sizes)}"
        sizes[name] = common
        for side in sides:
            side.take(name, common)
    return sides[0].rest(), sides[1].rest(), sizes


class _Side:
    """A shape read from the left: the current dim, its remainder ``left``, and the factors found."""

    def __init__(self, shape: Sequence[Any], prefix: str) -> None:
        self.shape, self.prefix = list(shape), prefix
        self.names: list[list[str]] = [[] for _ in shape]
        self.dim, self.left = -1, 1

    def advance(self) -> bool:
        """Moves to the next dim with a remainder above 1; False at the end."""
        while is_one(self.left) and self.dim + 1 < len(self.shape):
            self.dim += 1
            self.left = self.shape[self.dim]
        return not is_one(self.left)

    def take(self, name: str, size: Any) -> None:
        self.names[self.dim].append(name)
        self.left = 1 if known_equal(self.left, size) else self.left // size

    def whole(self) -> Any:
        """Gives the current dim's remainder a factor that stays whole; returns its size."""
        size, self.left = self.left, 1
        self.names[self.dim].append(f"{self.prefix}{self.dim}!")
        return size

    def rest(self) -> list[list[str]]:
        """The names; unread dims stay whole."""
        for dim in range(self.dim + 1, len(self.shape)):
            self.names[dim].append(f"{self.prefix}{dim}!")
        if not is_one(self.left):
            self.whole()
        return self.names


def _common(a: Any, b: Any) -> Any:
    """The greatest common divisor, None if it is 1 or unknown."""
    if isinstance(a, int) and isinstance(b, int):
        common = math.gcd(a, b)
        return None if common == 1 else common
    if known_equal(a, b):
        return a
    return b if known_equal(a % b, 0) else a if known_equal(b % a, 0) else None


def _skip(left: _Side, right: _Side) -> bool:
    """Leaves dims whole on both sides up to the next common boundary; False if there is none or it is unknown."""
    a, b = left.whole(), right.whole()
    while not known_equal(a, b):
        if not (isinstance(a, int) and isinstance(b, int)):
            return False
        side = left if a < b else right
        if not side.advance():
            return False
        if a < b:
            a *= side.whole()
        else:
            b *= side.whole()
    return True


def local_view(ctx: LocalContext) -> Any:
    """A reshape to the local shape, since the strides of a redistributed operand may not allow a view."""
    return ctx.emit(torch.ops.aten.reshape.default, ctx.args[0], list(ctx.output_shape()))


register(["aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"], view, local=local_view, packed=by_factor)
register(["aten.view_copy.default", "aten._reshape_copy.default"], view, local=local_view, packed=by_factor)
register(["aten._reshape_alias.default", "aten.flatten.using_ints", "aten.unflatten.int"], view, local=local_view, packed=by_factor)
