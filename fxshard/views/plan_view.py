"""PlanView: the fields of a plan's file, and what follows from them without torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fxshard.mesh.hardware import HARDWARE
from fxshard.views.words import placements

AGAIN = "_again"
"""What the name of a node ends with that runs a second time, in the backward."""
REDUCTIONS = ("all_reduce", "reduce_scatter")

Fields = Mapping[str, Any]


class Where(NamedTuple):
    """A module, "" for the model itself, and whether its backward is meant."""

    module: str
    backward: bool


@dataclass(frozen=True)
class Collective:
    """A planned collective. ``cost``, ``hidden``: its shares of the objective and of the hidden microseconds; ``source``, ``target``: the
    value's placement on the axis before and after; ``own``: whether a node issues it itself; ``readers``: (node, operand)."""

    number: int
    kind: str
    axis: str
    bytes: int
    cost: float
    hidden: float
    before: str
    after: str
    source: str
    target: str
    value: str
    readers: tuple[tuple[str, int], ...]
    entry: int
    step: int
    own: bool


@dataclass(frozen=True)
class PlanView:
    """``fields``: those of a plan's file."""

    fields: Fields

    @cached_property
    def axes(self) -> dict[str, int]:
        return dict(self.fields["mesh"]["axes"])

    @cached_property
    def hardware(self) -> str:
        hardware = self.fields["mesh"].get("hardware", "cpu")
        return str(hardware if isinstance(hardware, str) else hardware["name"])

    @cached_property
    def overlaps(self) -> bool:
        """Whether some collectives may overlap with compute on this hardware."""
        said = self.fields["mesh"].get("hardware", "cpu")
        known = HARDWARE[said].overlap if isinstance(said, str) and said in HARDWARE else 0.0
        return bool(known if isinstance(said, str) else said.get("overlap", 0.0))

    @cached_property
    def device_memory(self) -> float | None:
        """Bytes that a device has; None if that is unknown."""
        said = self.fields["mesh"].get("hardware", "cpu")
        known = HARDWARE[said].memory if isinstance(said, str) and said in HARDWARE else None
        return known if isinstance(said, str) else said.get("memory")

    @property
    def mesh_text(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def partial(self) -> bool:
        return bool(self.fields.get("partial", False))

    @property
    def train(self) -> bool:
        return bool(self.fields.get("train", True))

    @property
    def unit(self) -> str:
        return str(self.fields["certificate"]["unit"]) if "certificate" in self.fields else "microseconds"

    @property
    def objective(self) -> float:
        return float(self.fields["certificate"]["objective"]) if "certificate" in self.fields else 0.0

    @property
    def lower_bound(self) -> float:
        return float(self.fields["certificate"]["lower_bound"]) if "certificate" in self.fields else 0.0

    @property
    def cut(self) -> bool:
        return "certificate" in self.fields and bool(self.fields["certificate"].get("cut", False))

    @property
    def gap(self) -> float:
        return (self.objective - self.lower_bound) / self.objective if self.objective else 0.0

    @property
    def memory(self) -> dict[str, int]:
        return dict(self.fields.get("memory", {}))

    @property
    def memory_limit(self) -> int | None:
        return self.fields.get("memory_limit")

    @cached_property
    def nodes(self) -> dict[str, Fields]:
        return {node["name"]: node for node in self.fields["nodes"]}

    @cached_property
    def redistributions(self) -> list[Fields]:
        return list(self.fields.get("redistributions", ()))

    @cached_property
    def inputs(self) -> dict[str, tuple[str, str]]:
        """(kind, user's name) of each input, by node."""
        return {end["node"]: (end["kind"], end["name"]) for end in self.fields.get("inputs", ())}

    @cached_property
    def outputs(self) -> list[tuple[str, str]]:
        """(kind, user's name) of each output."""
        return [(end["kind"], end["name"]) for end in self.fields.get("outputs", ())]

    @cached_property
    def lines(self) -> dict[str, str]:
        return {node: row["line"] for row in self.fields.get("lines", ()) for node in row["nodes"]}

    @cached_property
    def places(self) -> dict[str, Where]:
        rows = self.fields.get("modules", ())
        return {node: Where(row["module"], row.get("backward", False)) for row in rows for node in row["nodes"]}

    @cached_property
    def reads(self) -> dict[str, list[str]]:
        """The nodes that make each node's operands."""
        return {row["node"]: row["of"] for row in self.fields.get("reads", ())}

    @cached_property
    def picked(self) -> dict[str, str]:
        """The node of a value that is one of several results."""
        return {row["value"]: row["node"] for row in self.fields.get("picked", ())}

    @cached_property
    def fallbacks(self) -> list[tuple[str, str]]:
        return [(row["node"], row["reason"]) for row in self.fields.get("fallbacks", ())]

    def called(self, node: str) -> str:
        """The user's name of a parameter, buffer or input; else the node's name."""
        return self.inputs[node][1] if node in self.inputs else node

    def producer(self, value: str) -> str:
        """The node that makes a value."""
        return self.picked.get(value, value)

    def place(self, node: str) -> Where | None:
        """The module of a node; a second run is the backward's."""
        found = self.places.get(node)
        if found is None and node.endswith(AGAIN):
            first = self.places.get(node.removesuffix(AGAIN))
            return None if first is None else Where(first.module, True)
        return found

    def line(self, node: str) -> str:
        return self.lines.get(node) or self.lines.get(node.removesuffix(AGAIN), "")

    @cached_property
    def collectives(self) -> list[Collective]:
        """Those of redistributions, then those that nodes issue, in the order of the plan."""
        moves, nodes, axes = self.redistributions, list(self.nodes.values()), list(self.axes)
        found = []
        for number, row in enumerate(self.fields.get("collectives", ())):
            own = row["entry"] >= len(moves)
            at = axes.index(row["axis"])
            if own:
                node = nodes[row["entry"] - len(moves)]
                value, readers = node["name"], [[node["name"], node["collectives"][row["step"]]["operand"]]]
            else:
                value, readers = moves[row["entry"]]["value"], moves[row["entry"]]["readers"]
            before, after = placements(row["from"])[at], placements(row["to"])[at]
            found.append(
                Collective(
                    number,
                    row["kind"],
                    row["axis"],
                    row["bytes"],
                    row["cost"],
                    row.get("hidden", 0.0),
                    before,
                    after,
                    row["from"],
                    row["to"],
                    value,
                    tuple((name, index) for name, index in readers),
                    row["entry"],
                    row["step"],
                    own,
                )
            )
        return found

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Cost of the collectives of redistributions by axis, without what is hidden."""
        found = dict.fromkeys(self.axes, 0.0)
        for c in self.collectives:
            found[c.axis] += c.cost
        return found

    @property
    def compute(self) -> float:
        """The rest of the objective: operators with their own collectives, and local steps of redistributions."""
        return max(self.objective - math.fsum(self.exposed.values()), 0.0)

    @property
    def own_axes(self) -> Counter[str]:
        """The number of collectives that nodes issue themselves, by axis."""
        return Counter(c.axis for c in self.collectives if c.own)

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Microseconds that the objective omits, assuming overlap with compute: ``gathers`` of parameters, ``reductions`` of gradients."""
        found: dict[str, list[float]] = {"gathers": [], "reductions": []}
        for entry in self.redistributions:
            reduces = any(step["kind"] in REDUCTIONS for step in entry["steps"])
            found["reductions" if reduces else "gathers"].append(entry.get("hidden", 0.0))
        return {kind: time for kind, times in found.items() if (time := math.fsum(times))}

    @cached_property
    def traffic(self) -> list[tuple[str, str, int, int]]:
        """(kind, axis, number, bytes that a rank sends) of the collectives, axes in mesh order."""
        sizes: dict[tuple[int, str], list[int]] = {}
        axes = list(self.axes)
        for c in self.collectives:
            sizes.setdefault((axes.index(c.axis), c.kind), []).append(c.bytes)
        return [(kind, axes[axis], len(all_), sum(all_)) for (axis, kind), all_ in sorted(sizes.items())]

    @cached_property
    def earlier(self) -> dict[int, int]:
        """Index of a redistribution -> index of an earlier one of the same value to the same layout; a second run gives the same value."""
        first: dict[tuple[str, str], int] = {}
        keys = [(entry["value"].removesuffix(AGAIN), entry["target"]) for entry in self.redistributions]
        return {k: first[key] for k, key in enumerate(keys) if first.setdefault(key, k) != k}

    @cached_property
    def repeated(self) -> dict[str, list[str]]:
        """Values that are redistributed, dropped, and redistributed again for the backward, under ``gathered twice`` or ``moved twice``."""
        found: dict[str, list[str]] = {}
        for entry in (self.redistributions[index] for index in self.earlier):
            if not entry["value"].endswith(AGAIN):  # the recomputed blocks already say so
                label = "gathered twice" if any(step["kind"] == "all_gather" for step in entry["steps"]) else "moved twice"
                found.setdefault(label, []).append(self.called(entry["value"]))
        return {label: list(dict.fromkeys(names)) for label, names in found.items()}

    def local_share(self, layout: str, shape: list[int]) -> float:
        """The whole tensor's elements per element of the largest shard."""
        local = list(shape)
        for placement, count in zip(placements(layout), self.axes.values(), strict=False):
            if placement.startswith("S("):
                dim = int(re.split(r"[:) ]", placement[2:])[0])
                local[dim] = -(-local[dim] // count)
        return math.prod(shape) / max(math.prod(local), 1)
