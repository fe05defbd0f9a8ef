"""The edges and modules of a plan's graph in its JSON file. They say where things come from, and count neither for equality nor for the hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.files import Field


def write_edges(reads: Mapping[str, tuple[str, ...]], modules: Mapping[str, str]) -> dict[str, Any]:
    """``reads``: one entry per node; ``modules``: one entry per module with its nodes. Nothing for a plan that knows neither."""
    nodes: dict[str, list[str]] = {}
    for node, path in modules.items():
        nodes.setdefault(path, []).append(node)
    return {
        **({"reads": [{"node": node, "values": list(values)} for node, values in reads.items()]} if reads else {}),
        **({"modules": [{"module": path, "nodes": found} for path, found in nodes.items()]} if nodes else {}),
    }


def read_reads(field: Field) -> dict[str, tuple[str, ...]]:
    """Node -> the values that it reads; raises FileError if a node occurs twice."""
    reads: dict[str, tuple[str, ...]] = {}
    for one in field.items():
        node, values = one.record({"node": Field.text, "values": _texts}).values()
        if node in reads:
            raise one.fail(f"the node {node!r} occurs twice", "correct this field, or make the plan again")
        reads[node] = values
    return reads


def read_modules(field: Field) -> dict[str, str]:
    """Node -> the module in whose forward it is."""
    modules: dict[str, str] = {}
    for one in field.items():
        module, nodes = one.record({"module": Field.text, "nodes": _texts}).values()
        modules |= dict.fromkeys(nodes, module)
    return modules


def _texts(field: Field) -> tuple[str, ...]:
    return field.tuple_of(Field.text)
