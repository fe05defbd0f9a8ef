"""One-word plans for a mesh axis: ``parallel={"dp": FullyShard(), "tp": "auto"}``. Each says a few layouts; the solver chooses the rest.

DataParallel      inputs and results of modules sharded by batch, parameters whole (DDP, Li et al. 2020)
FullyShard        likewise, parameters sharded and gathered where they are used (FSDP, ZeRO 3, Rajbhandari et al. 2020)
HybridShard       on a pair of axes: DataParallel on the first, FullyShard on the second (Zhao et al. 2023)
TensorParallel    inputs whole, no matrix whole (Megatron, Shoeybi et al. 2019; which dims, the solver chooses)
ContextParallel   inputs and results of modules sharded by sequence, parameters whole (Ulysses, Jacobs et al. 2023)
ExpertParallel    inputs sharded by batch, the experts' weights by expert (GShard, Lepikhin et al. 2020)
"auto"            says nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import OptionError, a_kind, closest
from fxshard.mesh.mesh import Mesh

Shape = tuple[int, ...]
AUTO = "auto"


@dataclass(frozen=True)
class AxisPlan:
    """What a word says about one axis. ``cut``: the dim by which inputs and results of modules are sharded, None: not at all."""

    @property
    def cut(self) -> int | None:
        return None

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        """The placement of a parameter, None: free."""
        return None

    def is_never_whole(self, name: str, shape: Shape) -> bool:
        """Whether a parameter must not be replicated."""
        return False


@dataclass(frozen=True)
class DataParallel(AxisPlan):
    """The batch is sharded, parameters are whole; gradients are reduced."""

    @property
    def cut(self) -> int | None:
        return 0

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Replicate()


@dataclass(frozen=True)
class FullyShard(AxisPlan):
    """The batch is sharded, and so are parameters, along ``dim``; they are gathered where they are used."""

    dim: int = 0

    @property
    def cut(self) -> int | None:
        return 0

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Shard(self.dim) if self.dim < len(shape) else Replicate()


@dataclass(frozen=True)
class TensorParallel(AxisPlan):
    """Inputs are whole; each matrix is sharded along a dim of the solver's choice."""

    def is_never_whole(self, name: str, shape: Shape) -> bool:
        return sum(size > 1 for size in shape) >= 2


@dataclass(frozen=True)
class ContextParallel(AxisPlan):
    """The sequence, dim ``dim`` of the inputs, is sharded; parameters are whole."""

    dim: int = 1

    @property
    def cut(self) -> int | None:
        return self.dim

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Replicate()


@dataclass(frozen=True)
class ExpertParallel(AxisPlan):
    """The batch is sharded, and so are the weights that match ``experts``, along their first dim; other parameters are whole."""

    experts: str = "*experts*"

    @property
    def cut(self) -> int | None:
        return 0

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Shard(0) if fnmatchcase(name, self.experts) and len(shape) >= 2 else Replicate()


@dataclass(frozen=True)
class HybridShard:
    """For a pair of axes: ``{("dp_replicate", "dp_shard"): HybridShard()}``."""

    dim: int = 0


WORDS = (DataParallel, FullyShard, HybridShard, TensorParallel, ContextParallel, ExpertParallel)
Parallel = Mapping[str, AxisPlan]


def read_parallel(given: Any, mesh: Mesh) -> dict[str, AxisPlan]:
    """The plan of each axis that has one. ``given``: a mapping from axes (or pairs of them) to words, or one word for a mesh of one axis.

    Raises OptionError for anything else.
    """
    if given is None or given == AUTO:
        return {}
    if not isinstance(given, Mapping):
        if mesh.ndim > (2 if isinstance(given, HybridShard) else 1):
            what = f"{given!r:.60} does not say for which axis, and the mesh has {', '.join(mesh.axis_names)}"
            raise OptionError(what, where="parallel", remedy=f"name it: parallel={{{mesh.axis_names[0]!r}: ...}}")
        given = {mesh.axis_names if isinstance(given, HybridShard) else mesh.axis_names[0]: given}
    found: dict[str, AxisPlan] = {}
    for axes, word in given.items():
        found.update(_read(axes, word, mesh))
    return found


def _read(axes: Any, word: Any, mesh: Mesh) -> dict[str, AxisPlan]:
    names = axes if isinstance(axes, tuple) else (axes,)
    for name in names:
        if name not in mesh.axis_names:
            what = f"the mesh has no axis {name!r}{closest(str(name), mesh.axis_names)}"
            raise OptionError(what, where="parallel", remedy=f"name one of {', '.join(mesh.axis_names)}")
    if word == AUTO or word is None:
        return {}
    if isinstance(word, HybridShard):
        if len(names) != 2:
            remedy = 'give the axis of replicas and the axis of shards: {("dp_replicate", "dp_shard"): HybridShard()}'
            raise OptionError(f"HybridShard is for two axes, not for {names}", where="parallel", remedy=remedy)
        return {names[0]: DataParallel(), names[1]: FullyShard(word.dim)}
    if not isinstance(word, AxisPlan):
        remedy = f'give "auto" or one of {", ".join(f"{w.__name__}()" for w in WORDS)}'
        raise OptionError(f"{word!r:.60}, given for {axes!r}, is {a_kind(word)}", where="parallel", remedy=remedy)
    return dict.fromkeys(names, word)


def of_inputs(parallel: Parallel, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Placement]]:
    """The placements of inputs by name and axis, for all axes that have a plan.

    An input is sharded along the dim that an axis cuts if this dim is as long as in the first input, and replicated otherwise.
    """
    first = next((shape for shape in shapes.values() if shape), ())
    found: dict[str, dict[str, Placement]] = {}
    for name, shape in shapes.items():
        found[name] = {axis: placement_of_value(plan, shape, first) or Replicate() for axis, plan in parallel.items()}
    return found


def placement_of_value(plan: AxisPlan, shape: Sequence[int], first: Sequence[int]) -> Placement | None:
    """``Shard`` of the dim that ``plan`` cuts, if a tensor of ``shape`` has it in common with the first input, of shape ``first``."""
    dim = plan.cut
    return Shard(dim) if dim is not None and dim < min(len(shape), len(first)) and shape[dim] == first[dim] else None


def of_results(parallel: Parallel, shape: Sequence[int], first: Sequence[int]) -> Iterator[tuple[str, Placement]]:
    """(axis, placement) of a module's result, as far as the plans say."""
    for axis, plan in parallel.items():
        placement = placement_of_value(plan, shape, first)
        if placement is not None:
            yield axis, placement
