"""Arguments that the model itself takes as a rank's shards (``DTensor.from_local`` of an argument)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import pytree
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import as_mesh
from fxshard.shapes.arguments import path_name


@dataclass
class ShardArguments:
    """``layouts``: path of an argument that is a shard -> axis name -> placement, as far as traces have found them."""

    device_mesh: DeviceMesh
    layouts: dict[str, Mapping[str, Placement]] = field(default_factory=dict)

    def learn(self, layouts: Mapping[str, Mapping[str, Placement]]) -> bool:
        """Notes shards that a trace found; whether they are new."""
        new = not layouts.keys() <= self.layouts.keys()
        self.layouts.update(layouts)
        return new

    def distributed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with DTensors in place of shards; replicated on the axes that the model does not name."""
        if not self.layouts:
            return args, kwargs
        paths, spec = pytree.tree_flatten_with_path((args, kwargs))
        both: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            [self._one(path_name(path), leaf) for path, leaf in paths], spec
        )
        return both

    def _one(self, path: str, leaf: Any) -> Any:
        if path not in self.layouts or not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
            return leaf
        names = as_mesh(self.device_mesh).axis_names
        return DTensor.from_local(leaf, self.device_mesh, [self.layouts[path].get(name, Replicate()) for name in names], run_check=False)

    def results(self, graph: PlanningGraph, leaves: Mapping[str, Any]) -> tuple[list[bool] | None, frozenset[str]]:
        """(for each output whether it is not whole, the names of those of which the caller gets the shard); (None, none) if the caller's
        arguments alone decide."""
        if not graph.forms and not self.layouts:
            return None, frozenset()
        every = any(isinstance(leaf, DTensor) for path, leaf in leaves.items() if path not in self.layouts)
        outputs = [end.name for end in graph.outputs if end.kind == "output"]
        return [every or name in graph.forms for name in outputs], frozenset(n for n, form in graph.forms.items() if form.kind == "local")
