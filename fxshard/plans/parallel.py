"""One-word plans for a mesh axis: ``parallel={"dp": FullyShard(), "tp": "auto"}``.

Each says a few layouts, and the solver chooses the rest.

    DataParallel      inputs and results of modules sharded by batch, parameters whole (DDP, Li et al. 2020)
    FullyShard        likewise, parameters sharded and gathered where they are used (FSDP, ZeRO 3, Rajbhandari et al. 2020)
    HybridShard       on a pair of axes: DataParallel on the first, FullyShard on the second (Zhao et al. 2023)
    TensorParallel    inputs whole, no matrix whole (Megatron, Shoeybi et al. 2019; which dims, the solver chooses)
    ContextParallel   inputs and results of modules sharded by sequence, parameters whole (Ulysses, Jacobs et al. 2023)
    ExpertParallel    inputs sharded by batch, the experts' weights by expert (GShard, Lepikhin et al. 2020)
    "auto"            says nothing
    {name: style}     the weights of the named modules by columns or rows, in the words of Hugging Face's tp_plan (see ``STYLES``)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import OptionError, a_kind, closest
from fxshard.mesh.mesh import Mesh

log = logging.getLogger("fxshard")

Shape = tuple[int, ...]
AUTO = "auto"


@dataclass(frozen=True)
class AxisPlan:
    """What a word says about one axis. ``cut``: the dim by which inputs and results of modules are sharded, None: not at all."""

    def said_of(self, name: str) -> str:
        """What it says about a parameter or module, for errors: as the user writes it."""
        return str(self)

    @property
    def cut(self) -> int | None:
        return None

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        """The placement of a parameter, None: free."""
        return None

    def beside(self, name: str, shape: Shape) -> tuple[Placement, ...]:
        """Placements that will do as well if another axis shards the dim that ``parameter`` says."""
        return ()

    def is_never_whole(self, name: str, shape: Shape) -> bool:
        """Whether a parameter must not be replicated."""
        return False

    def value(self, shape: Shape, first: Shape) -> Placement | None:
        """``Shard`` of the dim that is cut, if a tensor of ``shape`` has it in common with the first input, of shape ``first``, and it is
        not one element long: rules shard no such dim, as nothing is saved by it."""
        dim = self.cut
        if dim is None or dim >= min(len(shape), len(first)) or shape[dim] != first[dim]:
            return None
        return None if isinstance(shape[dim], int) and shape[dim] == 1 else Shard(dim)  # a symbol is any size

    def result(self, module: str, shape: Shape, first: Shape) -> Placement | None:
        """The placement of a result of a module, None: free."""
        return self.value(shape, first)

    def is_returned_whole(self, module: str) -> bool:
        """Whether results of ``module`` are whole where the model returns them."""
        return False

    def unmatched(self, names: Collection[str]) -> list[str]:
        """What it says of modules or parameters that are not among ``names``."""
        return []


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
    """The batch is sharded, and so are parameters, along ``dim``; they are gathered where they are used.

    A parameter without that dim, or with one element along it, is whole. If another axis shards ``dim`` of a parameter, it may be sharded
    along another dim, or be whole if it has none: a gather over an axis is one step only if no later axis shards the same dim, and of a
    packed dim there is no other axis. Raises OptionError for a dim that is no number from 0 on.
    """

    dim: int = 0

    def __post_init__(self) -> None:
        _check_dim(self)

    @property
    def cut(self) -> int | None:
        return 0

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Shard(self.dim) if self.dim < len(shape) and shape[self.dim] > 1 else Replicate()

    def beside(self, name: str, shape: Shape) -> tuple[Placement, ...]:
        return tuple(Shard(d) for d, size in enumerate(shape) if d != self.dim and size > 1) or (Replicate(),)


def _check_dim(plan: FullyShard | HybridShard | ContextParallel) -> None:
    if type(plan.dim) is not int or plan.dim < 0:
        kind = type(plan).__name__
        raise OptionError(f"{kind} shards along a dim, not {plan.dim!r}", where=kind, remedy=f"count dims from 0: {kind}(dim=1)")


@dataclass(frozen=True)
class TensorParallel(AxisPlan):
    """Inputs are whole; each matrix is sharded along a dim of the solver's choice."""

    def is_never_whole(self, name: str, shape: Shape) -> bool:
        return sum(size > 1 for size in shape) >= 2


@dataclass(frozen=True)
class ContextParallel(AxisPlan):
    """The sequence, dim ``dim`` of the inputs, is sharded; parameters are whole. Raises OptionError unless it counts from 0."""

    dim: int = 1

    def __post_init__(self) -> None:
        _check_dim(self)

    @property
    def cut(self) -> int | None:
        return self.dim

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Replicate()


@dataclass(frozen=True)
class ExpertParallel(AxisPlan):
    """The batch is sharded, and so are the weights of the modules named ``experts`` (a glob), along their first dim; others are whole.

    A name is one of the path's parts, so ``shared_experts``, which all tokens choose, are whole.
    """

    experts: str = "experts"

    @property
    def cut(self) -> int | None:
        return 0

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        return Shard(0) if self._holds(name) and len(shape) >= 2 else Replicate()

    def unmatched(self, names: Collection[str]) -> list[str]:
        return [] if any(map(self._holds, names)) else [self.experts]

    def _holds(self, name: str) -> bool:
        parts = name.split(".")
        return any(_names(self.experts, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


COLUMNS, ROWS, WHOLE, FIRST, GATHERED = "columns", "rows", "whole", "first", "gathered"
PACKED_COLUMNS, PACKED_ROWS = "packed columns", "packed rows"
STYLES: dict[str, tuple[str | None, str | None]] = {
    "colwise": (COLUMNS, COLUMNS),
    "rowwise": (ROWS, None),
    "colwise_gather_output": (COLUMNS, GATHERED),
    "colwise_rep": (COLUMNS, GATHERED),
    "rowwise_split_input": (ROWS, None),
    "rowwise_rep": (ROWS, None),
    "embedding_rowwise": (FIRST, None),
    "embedding_colwise": (ROWS, None),
    "grouped_gemm": (FIRST, None),
    "replicate": (WHOLE, None),
    "replicated_with_grad_allreduce": (WHOLE, None),
    "sequence_parallel": (WHOLE, None),
    "mla_kv_a_proj": (WHOLE, WHOLE),
    "packed_colwise": (PACKED_COLUMNS, None),
    "packed_rowwise": (PACKED_ROWS, None),
    "moe_tp_experts": (None, None),
    "ep_dispatch_experts": (None, None),
    "moe_identity_expert": (None, None),
    "local_params": (None, None),
    "all_reduce": (None, None),
}
"""Words of Hugging Face's ``tp_plan`` (transformers 5) -> how weights are sharded, and the module's result.

Columns are outputs: dim -2 of a weight, the last dim of the result, and the bias; rows are inputs, dim -1 of a weight. Packed ones are
those of several matrices in one weight, each of which is sharded. Gathered results are whole where the model returns them. None: left to
the solver, as are results that the module would reduce: a condition would hold for the product itself, which would be computed whole."""


@dataclass(frozen=True)
class ByName(AxisPlan):
    """Styles of modules or parameters by glob; names may lack the name of the base model (``model.``)."""

    styles: tuple[tuple[str, str], ...]

    def said_of(self, name: str) -> str:
        return str(dict(filter(None, (self._entry(name), self._entry(name.rpartition(".")[0])))))

    def _entry(self, name: str) -> tuple[str, str] | None:
        return next((entry for entry in self.styles if _names(entry[0], name)), None)

    def _style(self, name: str) -> tuple[str | None, str | None]:
        entry = self._entry(name)
        return STYLES[entry[1]] if entry else (None, None)

    def parameter(self, name: str, shape: Shape) -> Placement | None:
        how = self._style(name)[0] or self._style(name.rpartition(".")[0])[0]
        if how is None:
            return None
        matrix = len(shape) > 1
        columns, rows = len(shape) - 2 if matrix else 0, len(shape) - 1 if matrix else None
        dim = {COLUMNS: columns, PACKED_COLUMNS: columns, ROWS: rows, PACKED_ROWS: rows, FIRST: 0}.get(how)
        if dim is not None and how in (PACKED_COLUMNS, PACKED_ROWS):
            return PackedShard(dim, ())
        return Replicate() if dim is None else Shard(dim)

    def result(self, module: str, shape: Shape, first: Shape) -> Placement | None:
        how = self._style(module)[1]
        return {COLUMNS: Shard(len(shape) - 1), WHOLE: Replicate()}.get(how or "") if shape else None

    def is_returned_whole(self, module: str) -> bool:
        return self._style(module)[1] == GATHERED

    def unmatched(self, names: Collection[str]) -> list[str]:
        return [glob for glob, _ in self.styles if not any(_names(glob, name) for name in names)]


def _names(glob: str, name: str) -> bool:
    """Whether ``glob`` matches the last parts of ``name``, each wildcard within one part, as in torch's ``parallelize_module``."""
    globs, parts = glob.split("."), name.split(".")
    return bool(name) and len(globs) <= len(parts) and all(map(fnmatchcase, parts[-len(globs) :], globs))


@dataclass(frozen=True)
class HybridShard:
    """For a pair of axes: ``{("dp_replicate", "dp_shard"): HybridShard()}``."""

    dim: int = 0

    def __post_init__(self) -> None:
        _check_dim(self)


WORDS = (DataParallel, FullyShard, HybridShard, TensorParallel, ContextParallel, ExpertParallel)
Parallel = Mapping[str, AxisPlan]
NAMED: Mapping[str, AxisPlan | HybridShard] = {
    "ddp": DataParallel(),
    "fsdp": FullyShard(),
    "hsdp": HybridShard(),
    "tp": TensorParallel(),
    "cp": ContextParallel(),
    "ep": ExpertParallel(),
}
"""Words as text: ``{"dp": "fsdp", "tp": "auto"}``."""


def read_parallel(given: Any, mesh: Mesh) -> dict[str, AxisPlan]:
    """The plan of each axis that has one. ``given``: a mapping from axes (or pairs of them) to words, or one word for a mesh of one axis.

    Raises OptionError for anything else.
    """
    if given is None or given == AUTO:
        return {}
    given = NAMED.get(given, given) if isinstance(given, str) else given
    if not isinstance(given, Mapping) or (given and not _is_by_axis(given, mesh)):
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
    word = NAMED.get(word, word) if isinstance(word, str) else word
    if word == AUTO or word is None:
        return {}
    if isinstance(word, HybridShard):
        if len(names) != 2:
            remedy = 'give the axis of replicas and the axis of shards: {("dp_replicate", "dp_shard"): HybridShard()}'
            raise OptionError(f"HybridShard is for two axes, not for {names}", where="parallel", remedy=remedy)
        return {names[0]: DataParallel(), names[1]: FullyShard(word.dim)}
    if isinstance(word, Mapping):
        return dict.fromkeys(names, _by_name(word))
    if not isinstance(word, AxisPlan):
        remedy = (
            f'give "auto", {", ".join(map(repr, NAMED))}, {", ".join(f"{w.__name__}()" for w in WORDS)}, or {{"layers.*.up": "colwise"}}'
        )
        what = f"not a word for an axis{closest(word, (AUTO, *NAMED))}" if isinstance(word, str) else a_kind(word)
        raise OptionError(f"{word!r:.60}, given for {axes!r}, is {what}", where="parallel", remedy=remedy)
    return dict.fromkeys(names, word)


def _is_by_axis(given: Mapping[Any, Any], mesh: Mesh) -> bool:
    """Whether keys are axes: if none is, and all values are styles of modules, they are names of modules."""
    axes = {axis for key in given for axis in (key if isinstance(key, tuple) else (key,))}
    return bool(axes & set(mesh.axis_names)) or not all(isinstance(style, str) and style not in NAMED for style in given.values())


def _by_name(styles: Mapping[Any, Any]) -> ByName:
    for name, style in styles.items():
        if not isinstance(name, str) or style not in STYLES:
            kind = closest(style, STYLES) if isinstance(style, str) else ": torch's styles are applied by fxshard.parallelize_module"
            what = f"{name!r}: {style!r:.60} is not a style of a module's weights{kind}"
            raise OptionError(what, where="parallel", remedy=f"give one of {', '.join(STYLES)}")
    if free := sorted({style for style in styles.values() if STYLES[style] == (None, None)}):
        text = "the solver shards what a tp_plan calls %s: these styles say how a module runs, not how its weights are sharded"
        log.info(text, ", ".join(free))
    return ByName(tuple(styles.items()))


def left_whole(parallel: Parallel, mesh: Mesh) -> str:
    """The layout of inputs that is whole on the axes that have no plan, and open on the others: ``"*R"``."""
    return "".join("*" if axis in parallel else "R" for axis in mesh.axis_names)


def leading(parallel: Parallel, shapes: Iterable[Shape]) -> Shape:
    """The shape of the first input with more than one element along each dim that is cut, which a mask [1, 1, s, s] has not; else of the
    first that is no scalar."""
    given = [shape for shape in shapes if shape]
    cuts = [plan.cut for plan in parallel.values() if plan.cut is not None]
    return next((shape for shape in given if all(dim < len(shape) and shape[dim] != 1 for dim in cuts)), given[0] if given else ())


def of_inputs(parallel: Parallel, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Placement]]:
    """The placements of inputs by name and axis, for all axes that have a plan.

    An input is sharded along the dim that an axis cuts if this dim is as long as in the ``leading`` input, and replicated otherwise.
    """
    first = leading(parallel, shapes.values())
    found = {name: {axis: plan.value(shape, first) or Replicate() for axis, plan in parallel.items()} for name, shape in shapes.items()}
    for axis, plan in parallel.items():
        if first and plan.cut is not None and all(placed[axis] == Replicate() for placed in found.values()):
            text = "no input is sharded along %s: %s shards dim %d, as long as in an input of shape %s"
            log.warning(text, axis, type(plan).__name__, plan.cut, list(first))
    return found
