"""What pipelines do not support: each refusal names the module, parameter or operator."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.operators import named_arguments, schema_of
from fxshard.errors import OptionError, PlanError, closest
from fxshard.mesh.mesh import Mesh
from fxshard.pipelines.schedule import SCHEDULES, microbatches_fit

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CALL = re.compile(r"@\d+(?=\.|$)")
PROBABILITIES = ("p", "dropout_p", "dropout")
NO_OFFLOAD = (
    "pipeline has no option 'offload': parameters on the host would be copied again for every microbatch, and their gradients are added up "
    "on the device between microbatches; the cut into stages counts neither"
)
OFFLOAD_REMEDY = "use more stages or larger inner axes, or fxshard.parallelize(..., offload=...) without a pipeline"


def check_axis(mesh: Mesh, axis: str, microbatches: int, schedule: str) -> None:
    """Raises OptionError unless ``mesh`` has ``axis`` and others, and ``microbatches`` keep all stages busy."""
    if axis not in mesh.axis_names:
        what = f"the mesh has no axis {axis!r}{closest(axis, mesh.axis_names)}"
        raise OptionError(what, where="axis", remedy=f"name one of {', '.join(mesh.axis_names)}")
    if mesh.ndim == 1:
        remedy = f"add an axis to shard the stages over, of one rank if need be: {axis}={mesh.size},tp=1"
        raise OptionError(f"the mesh has no axis besides {axis!r}", where="mesh", remedy=remedy)
    if schedule not in SCHEDULES:
        raise OptionError(f"unknown schedule {schedule!r}{closest(schedule, SCHEDULES)}", remedy=f"use one of {', '.join(SCHEDULES)}")
    stages = mesh.shape[mesh.axis(axis)]
    if type(microbatches) is not int or microbatches < stages:
        what = f"microbatches is {microbatches!r}, and the axis {axis!r} has {stages} stages"
        raise OptionError(what, where="microbatches", remedy=f"give at least {stages}; 4 to 8 times as many keep the stages busy")
    if not microbatches_fit(schedule, stages, microbatches):
        what = f"{schedule} passes microbatches in {microbatches // stages} rounds of equal size, and there are {microbatches}"
        raise OptionError(what, where="microbatches", remedy=f"give a multiple of {stages}, the ranks of axis {axis!r}")


def keyword_arguments(mb_kwargs: Mapping[str, Any] | None, example_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The model's keyword arguments, which have two names; raises OptionError if they are given by both."""
    if mb_kwargs is not None and example_kwargs is not None:
        what = "mb_kwargs and example_kwargs are two names of the same: keyword arguments for one microbatch"
        raise OptionError(what, where="example_kwargs", remedy="give all of them in one")
    return dict(mb_kwargs or example_kwargs or {})


def check_modules(model: nn.Module) -> None:
    """Raises PlanError for batch norm in training: its statistics would be those of microbatches."""
    name = next((name for name, module in model.named_modules() if isinstance(module, NORMS) and module.training), None)
    if name is not None:
        what = f"{name} is a {type(model.get_submodule(name)).__name__}, which would normalise each microbatch by itself"
        raise PlanError(what, remedy="use another norm (nn.GroupNorm), freeze it with .eval(), or do without a pipeline")


def check_graph(module: fx.GraphModule) -> None:
    """Raises PlanError for random operators, whose numbers would not be those of one device, for batch norm in training, and for buffers
    that the model writes."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            where = next((name for name in reversed(modules_of(node)) if name), "the model")
            if draws(node):
                remedy = "set its probability to 0, call .eval() on it, or do without a pipeline"
                raise PlanError(f"{where} draws random numbers ({node.target}), which stages cannot draw as one device does", remedy=remedy)
            if _normalises_the_batch(node):
                remedy = "use another norm (F.group_norm), pass training=False with running statistics, or do without a pipeline"
                raise PlanError(f"{where} would normalise each microbatch by itself ({node.target})", remedy=remedy)
            for written in _written(node):
                what = f"{where} writes {written!r} ({node.target}), once for each microbatch"
                raise PlanError(what, remedy="update it outside of the forward, or do without a pipeline")


def modules_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the modules in whose calls ``node`` was traced, from the outermost; that of the model is empty."""
    return tuple(_CALL.sub("", path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())


def is_further_call(*names: str) -> bool:
    """Whether names in a node's stack of modules are those of a call after the module's first: export appends ``@`` and its number."""
    return any(_CALL.search(name) for name in names)


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers: dropout in evaluation, or with probability 0, does not."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags and "dropout" not in node.target.name():
        return False
    given = named_arguments(node.target, node.args, node.kwargs)
    chances = [given[name] for name in PROBABILITIES if isinstance(given.get(name), int | float)]
    return given.get("train") is not False and not (chances and not any(chances))


def _normalises_the_batch(node: fx.Node) -> bool:
    """Whether an operator is batch norm with the statistics of its input."""
    return "batch_norm" in node.target.name() and named_arguments(node.target, node.args, node.kwargs).get("training") is True


def _written(node: fx.Node) -> list[str]:
    """The names of parameters and buffers that an operator writes."""
    schema = schema_of(node.target)
    if schema is None or not schema.is_mutable:
        return []
    given = named_arguments(node.target, node.args, node.kwargs)
    changed = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [str(one.target) for one in changed if isinstance(one, fx.Node) and one.op == "get_attr"]


def parameters_of(module: nn.Module) -> frozenset[str]:
    """The names of its parameters."""
    return frozenset(name for name, _ in module.named_parameters())


def fixed_starts(layers: Sequence[str], held: Sequence[Set[str]], model: nn.Module) -> dict[int, str]:
    """Index of each layer with which no stage may begin, because layers on both sides read the same parameter -> what they read.

    ``held``: the names of the parameters that each of ``layers`` reads.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[int, str] = {}
    for same in names.values():
        readers = [i for i, mine in enumerate(held) if not mine.isdisjoint(same)]
        if len(readers) > 1:
            text = f"{' = '.join(same)}, read with {layers[readers[0]]} and with {layers[readers[-1]]}"
            found.update({i: text for i in range(readers[0] + 1, readers[-1] + 1) if i not in found})
    return found


def no_cut(tied: Mapping[int, str], names: Sequence[str], stages: int) -> PlanError:
    """The error for a model that cannot be cut into so many stages."""
    if not tied:
        what = f"the model has {len(names)} layers, too few for {stages} stages"
        return PlanError(what, where=", ".join(names), remedy="use a smaller axis, or do without a pipeline")
    what = f"stages would share a parameter, {next(iter(tied.values()))}"
    remedy = "untie them (for an embedding and a head: tie_word_embeddings=False), call each layer once, or do without a pipeline"
    return PlanError(what, remedy=remedy)
