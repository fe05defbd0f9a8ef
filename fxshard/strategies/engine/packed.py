"""Options of operators on packed dims: dims of several parts, such as that of ``[q | k | v]``, each of which an axis shards.

An operator that treats all elements of a dim alike, and knows them by the names of factors only, treats a packed dim as any other: all dims
with the factor are packed. Operators that take the parts apart, or join them, have forms of their own (``Registered.packed``). A view that
gives equal parts a dim of their own, (3 h) -> 3 h, turns a packed dim into a dim h that is sharded as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Dims, Factors

Parts = tuple[int, ...]
Packs = tuple[tuple[tuple[int, Parts], ...], ...]
"""For each operand, and then each output, of a call: (dim, sizes of its parts) for the dims that may be packed."""


@dataclass(frozen=True)
class PackedOption:
    """One way to run a call with packed dims. ``parts``: those of the sharded factor, which must be cut at the same places wherever it
    occurs; ``inner``: sizes by which a dim is longer than the factor; ``full``: no shard may be empty."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    parts: Parts
    inner: tuple[int, ...] = ()
    full: bool = False


def by_factor(call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any]) -> Iterator[PackedOption]:
    """The options of an operator that treats all elements of a dim alike; ``rule`` and ``sizes`` as from ``resolve``."""
    tensors = [*rule.operands, *rule.outputs]
    names = dict.fromkeys(f for dims in tensors if dims is not None for dim in dims for f in dim)
    for factor in (f for f in names if f not in rule.replicated):
        found = [_placed(dims, factor, dict(of_tensor), sizes) for dims, of_tensor in zip(tensors, packs, strict=True)]
        places = [p for _, p, _ in found if p is not None]
        if not all(fits for fits, _, _ in found) or not any(isinstance(p, PackedShard) for p in places):
            continue
        units = {unit for _, _, unit in found if unit is not None}
        inner = {n for dims in tensors if dims is not None for dim in dims for n in _lengths_inside(dim, factor, sizes)}
        if len(units) == 1:
            option = _option(rule, factor, [p for _, p, _ in found], units.pop(), tuple(sorted(inner)))
            if option is not None:
                yield option


def _lengths_inside(dim: tuple[str, ...], factor: str, sizes: dict[str, Any]) -> list[int]:
    return [math.prod(sizes[f] for f in dim[dim.index(factor) + 1 :])] if factor in dim and dim[-1] != factor else []


def _placed(dims: Dims | None, factor: str, packed: dict[int, Parts], sizes: dict[str, Any]) -> tuple[bool, Placement | None, Parts | None]:
    """(whether a tensor can be cut on ``factor``, how its dim is then placed, the parts in units of the factor); None: not on any dim."""
    places = [(d, dim.index(factor)) for d, dim in enumerate(dims or ()) if factor in dim]
    if not places:
        return True, None, None
    if len(places) > 1:
        return False, None, None
    (d, position), parts = places[0], packed.get(places[0][0], ())
    names = (dims or ())[d]
    inside = math.prod(sizes[f] for f in names[position + 1 :])
    if position == 0 and parts and min(parts) > 1:
        fits = not any(part % inside for part in parts)
        return fits, PackedShard(d, parts), tuple(part // inside for part in parts)
    if position == 0 and not parts:
        return True, Shard(d), (sizes[factor],)
    if position == 1 and parts and set(parts) == {sizes[factor] * inside} and len(parts) == sizes[names[0]]:
        return True, PackedShard(d, parts), (sizes[factor],)
    return False, None, None


def _option(rule: Factors, factor: str, places: Sequence[Placement | None], parts: Parts, inner: tuple[int, ...]) -> PackedOption | None:
    """Each tensor placed; one without the factor is pending if it depends on one with it. None if that is impossible."""
    count = len(rule.operands)
    reduce = rule.reduce.get(factor, "sum")
    pending = [_is_pending(rule, o, places) for o in range(len(rule.outputs))]
    if any(pending) and reduce is None:
        return None
    missing: Placement = Partial(reduce) if any(pending) and reduce else Replicate()
    ins = tuple(p or (missing if i in rule.additive else Replicate()) for i, p in enumerate(places[:count]))
    outs = tuple(p or (missing if is_pending else Replicate()) for p, is_pending in zip(places[count:], pending, strict=True))
    whole = any(
        p is None and not is_pending and dims is not None for p, is_pending, dims in zip(places[count:], pending, rule.outputs, strict=True)
    )
    return PackedOption(ins, outs, parts, inner, whole or (bool(rule.additive) and any(pending)))


def _is_pending(rule: Factors, output: int, places: Sequence[Placement | None]) -> bool:
    if rule.outputs[output] is None or places[len(rule.operands) + output] is not None:
        return False
    sources = range(len(rule.operands)) if rule.depends is None else rule.depends[output]
    return any(places[i] is not None for i in sources)
