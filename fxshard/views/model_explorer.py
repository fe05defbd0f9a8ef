"""Node data for Google's Model Explorer: a value for each node of a graph that it shows, by the node's name.

Source of the format: ``node_data_builder.py`` of the package ai-edge-model-explorer 0.1.34. A file holds one value a node, so each kind
of value has a file of its own. Its graph of a .pt2 names nodes as ``torch.export.load`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.views.words import placements

COSTS = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#d55e00"}]
"""From cheap to expensive."""
LAYOUTS = ("#56b4e9", "#009e73", "#f0e442", "#e69f00", "#cc79a7", "#0072b2", "#d55e00")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
REPLICATED = "#ffffff"


def numbers(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    """Node data of numbers, coloured from the least to the greatest. ``name``: what is measured, with its unit."""
    return {"name": name, "results": {node: {"value": value} for node, value in values.items()}, "gradient": COSTS}


def texts(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Node data of layouts, a colour for each; what is replicated is white."""
    sharded = [value for value in dict.fromkeys(values.values()) if set(placements(value)) - {"R"}]
    colours = {value: LAYOUTS[k % len(LAYOUTS)] for k, value in enumerate(sharded)}
    results = {node: {"value": value, "bgColor": colours.get(value, REPLICATED)} for node, value in values.items()}
    return {"name": name, "results": results, "showExpandedSummaryOnGroupNode": True}
