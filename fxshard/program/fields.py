"""A program as plain data for views."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy

from fxshard._torch_compat.sizes.symbols import expression, is_symbolic, symbol_of
from fxshard.size_words import expression_words
from fxshard.views.plan_view import Fields


def program_fields(program: Any) -> Fields:
    """What a ``ShardedProgram`` has besides its plan. (Its file imports this one, so its type is not named here.)"""
    names = {str(symbol_of(one.value)): (one.name, one.unit) for one in program.sizes}

    def named(shape: Iterable[Any]) -> list[int | str]:
        return [expression_words(sympy.srepr(expression(size)), names) if is_symbolic(size) else int(size) for size in shape]

    return {
        "size_classes": len(program.modules),
        "by_rank": bool(program.ranks),
        "inputs": _ends(program.inputs, program.input_layouts, map(named, program.input_shapes), program.input_dtypes),
        "outputs": _ends(program.outputs, program.output_layouts, map(named, program.output_shapes), program.output_dtypes),
        "collectives": list(map(_collective, program.collectives)),
        "sizes": list(map(_size, program.sizes)),
        "guards": [{"condition": guard.words, "where": guard.where} for guard in program.guards],
        **_compiled(getattr(program, "compiled", None)),
    }


def _compiled(code: Any) -> dict[str, Any]:
    """Of an exported program with compiled code: the number of its models (one for each size class), and their devices."""
    if code is None:
        return {}
    return {"compiled": {"models": len(code.models), "devices": sorted({model.device for model in code.models.values()})}}


def _collective(c: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"kind": c.kind, "axis": c.axis, "bytes": c.bytes}
    return common | {"shape": list(c.shape), "dtype": c.dtype, "node": c.node, "serves": [list(pair) for pair in c.serves]}


def _size(one: Any) -> dict[str, Any]:
    places = [list(place) for place in one.places]
    limits = {"least": one.least, "most": one.most, "multiple_of": one.unit, "uneven": one.uneven, "served": one.served}
    return {"name": one.name, "places": places, **limits, "example": one.example}


def _ends(ends: Any, layouts: Any, shapes: Any, dtypes: Any) -> list[dict[str, Any]]:
    rows = zip(ends, layouts, shapes, dtypes, strict=True)
    return [{"kind": e.kind, "name": e.name, "layout": str(at), "shape": list(s), "dtype": d} for e, at, s, d in rows]
