"""parallelize_module: torch's parallel styles, and a plan for all that they leave open."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, parallel
from torch.distributed.tensor.parallel import ParallelStyle

from fxshard._torch_compat.dtensor.swaps import take_contents, without_flat_weights
from fxshard._torch_compat.groups import active_mesh
from fxshard.errors import OptionError, a_kind, closest
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.passes.trace.trace import check_call
from fxshard.plans.parallel import AUTO, NAMED, WORDS, ByName, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.options import check_device_mesh, read_options
from fxshard.runtime.calls.settings import Settings
from fxshard.runtime.calls.waiting import WaitingForward, dissolve, open_in, taken_over, with_parts
from fxshard.runtime.groups.distribute import distribute
from fxshard.runtime.module.accumulation import leave_pending
from fxshard.runtime.module.loading import accept_full_values
from fxshard.runtime.module.module import shard_module
from fxshard.runtime.module.module_state import refuse_plain_parameters
from fxshard.runtime.module.parameters import check_free, check_gradient_hooks, held_layout, layout_on, parameter_slots, shard_parameters
from fxshard.runtime.module.refusals import COMPILED
from fxshard.runtime.rank_graph.bind import mesh_device

Styles: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Applies torch's parallel styles to ``module`` in place, and shards what they leave open by a plan; returns the module.

    The styles mean what they mean to ``torch.distributed.tensor.parallel.parallelize_module``, which applies them. All other parameters
    become DTensors too, replicated at first. The first call is the example for which the rest is planned: then the parameters that no
    style names get the planned layouts, as the same objects, so that an optimiser may be made before. With ``example_args`` (as for
    ``parallelize``) this happens at once.

    Args:
        device_mesh: by default that of ``with device_mesh:``. A part of a mesh (``mesh["tp"]``) will do.
        parallelize_plan: styles by module name (``{"layers.*.attn.w[qkv]": ColwiseParallel()}``, wildcards and mappings within mappings
            as in torch), or one style for ``module`` itself; with several axes, what each is for, by its name: ``{"dp": FullyShard(),
            "tp": {"up": ColwiseParallel()}}``, where a one-word plan or a ``tp_plan`` of Hugging Face (``fxshard.plans.parallel``) may
            stand for styles. A word alone is for a mesh of one axis. "auto", or no plan, leaves the choice to the solver.
        src_data_rank: as in torch, the rank within each axis whose weights count; None: each rank shards its own.
        options: those of ``parallelize``.

    Raises:
        OptionError: a plan that is none, a misspelt word or style, styles without an axis, words both in the plan and as ``parallel=``, a
            ``src_data_rank`` that an axis lacks. Otherwise as ``parallelize``, possibly at the first call.
    """
    mesh = device_mesh if device_mesh is not None else active_mesh()
    if mesh is None:
        raise OptionError("parallelize_module has no mesh", remedy="pass device_mesh, or call it within `with device_mesh:`")
    check_device_mesh(mesh)
    by_axis, settings = _read(parallelize_plan, options, mesh, module)  # before a forward that waits is removed
    waiting = dissolve(module) if isinstance(module, nn.Module) else ()
    check_call(module, example_args or ())
    check_gradient_hooks(module)
    if example_kwargs is not None and example_args is None:
        raise OptionError("example_kwargs need example_args", remedy="pass example_args=() beside them")
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.mesh.shape):
        what = f"there is no rank {src_data_rank} on each axis of a mesh of {' x '.join(map(str, mesh.mesh.shape))}"
        raise OptionError(what, where="src_data_rank", remedy="name a rank that every axis has, or None: each rank shards its own weights")
    settings = with_parts(settings, as_mesh(mesh), waiting)
    unsaid, partly = taken_over(module, waiting)
    slots = _made_plain(module, unsaid, mesh)
    plain = {name for name, p in module.named_parameters(remove_duplicate=False) if not isinstance(p, DTensor)}
    ties = _ties(module)
    for axis, styles in by_axis.items():
        part = mesh if mesh.ndim == 1 else mesh[axis]
        parallel.parallelize_module(module, part, _as_torch_takes(styles), src_data_rank=src_data_rank)
    _tie_again(module, ties)
    source = src_data_rank if src_data_rank is None else int(mesh.mesh[(src_data_rank,) * mesh.ndim])
    settings = replace(settings, src_data_rank=source)
    parts = {**partly, **parts_of_mesh(module, mesh)}
    if src_data_rank is not None:
        agree_across_axes(module, {name: part for name, part in parts.items() if name in plain}, mesh, src_data_rank)
    if not isinstance(settings.pins, ShardingPlan):
        settings = replace(settings, pins={**parts, **(settings.pins or {})})
    undecided = parts.keys() | {name for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    distribute_others(module, mesh, source)
    _same_objects(module, slots)
    free = [p for name, p in module.named_parameters() if name in undecided]
    if example_args is not None:
        return shard_module(module, mesh, settings, example_args, example_kwargs, None, open_parameters=free)
    module.forward = DeferredForward(module, vars(module).get("forward"), free, as_mesh(mesh), settings, mesh)
    accept_full_values(module)
    return module


def _read(plan: Any, options: Mapping[str, Any], mesh: DeviceMesh, module: nn.Module) -> tuple[dict[str, Styles], Settings]:
    """The styles of each axis that has some, and the options with the words for others. Raises OptionError for what cannot be read."""
    by_axis, words = split_plan(plan, mesh, module)
    given = options.get("parallel")
    if words and given is not None:
        what = f"parallelize_plan and parallel= both give words for axes: {words!r:.60} and {given!r:.60}"
        raise OptionError(what, where="parallel", remedy="give all of them in parallelize_plan")
    twice = [axis for axis, word in read_parallel(given, as_mesh(mesh)).items() if axis in by_axis and not isinstance(word, ByName)]
    if twice:
        what = f"parallelize_plan has styles for {twice[0]!r}, and parallel= a word: {given!r:.60}"
        raise OptionError(what, where="parallel", remedy="give one of the two: styles decide the layouts on their axis")
    return by_axis, read_options(Settings, {**options, "parallel": words or given}, "parallelize_module")


Slots = dict[tuple[int, str], nn.Parameter]
"""Parameters by the id of the module that holds them and their name there."""


def _made_plain(module: nn.Module, parameters: Sequence[nn.Parameter], device_mesh: DeviceMesh) -> Slots:
    """Puts plain parameters, which torch's styles take, in the places of replicated DTensors; returns these, which get other contents."""
    ids, plain = set(map(id, parameters)), dict[int, nn.Parameter]()
    with without_flat_weights(module):
        check_free({name: parameter for name, parameter in module.named_parameters() if id(parameter) in ids}, device_mesh)
    for parameter in parameters:
        made = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
        made.grad = None if parameter.grad is None else parameter.grad.to_local()
        plain[id(parameter)] = made
    slots = {(id(owner), name): parameter for owner, name, parameter in parameter_slots(module) if id(parameter) in plain}
    for owner, name, parameter in list(parameter_slots(module)):
        if id(parameter) in plain:
            setattr(owner, name, plain[id(parameter)])
    return slots


Ties = list[tuple[nn.Parameter, list[str]]]
"""Parameters that have several names, and these."""


def _ties(module: nn.Module) -> Ties:
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return [tie for tie in found.values() if len(tie[1]) > 1]


def _tie_again(module: nn.Module, ties: Ties) -> None:
    """Gives what a style has made of a tied parameter all of its names: torch puts it only where the style names it. Raises OptionError if
    the styles of two names have made parameters of different layouts."""
    now = dict(module.named_parameters(remove_duplicate=False))
    for before, all_names in ties:
        names = [name for name in all_names if name in now]
        made = {name: now[name] for name in names if now[name] is not before}
        for (first, one), (other, another) in itertools.pairwise(made.items()):
            if _layout_text(one) != _layout_text(another):
                layouts = f"{_layout_text(one)} and {_layout_text(another)}"
                what = f"{first} and {other} are one parameter, and their styles lay it out as {layouts}"
                remedy = "give their modules styles that shard it alike, or one of them only; the other then follows"
                raise OptionError(what, where=other, remedy=remedy)
        for name in names if made else ():
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, next(iter(made.values())))


def _layout_text(parameter: nn.Parameter) -> str:
    return f"{Layout(parameter.placements)} on {parameter.device_mesh}" if isinstance(parameter, DTensor) else "a plain tensor"


def _same_objects(module: nn.Module, slots: Slots) -> None:
    """Gives the objects in ``slots`` the contents of the parameters that have taken their places, for optimisers that hold them."""
    swapped: set[int] = set()
    with without_flat_weights(module):
        for owner, name, parameter in list(parameter_slots(module)):
            before = slots.get((id(owner), name), parameter)
            if before is parameter:
                continue
            if id(before) not in swapped:
                take_contents(before, parameter)
                swapped.add(id(before))
            setattr(owner, name, before)


def parts_of_mesh(module: nn.Module, device_mesh: DeviceMesh) -> dict[str, Any]:
    """The placements by axis of the parameters that a style has put on a part of ``device_mesh``; the plan decides on the other axes."""
    named = dict(module.named_parameters(remove_duplicate=False))
    known = {name: held_layout(p) for name, p in named.items() if isinstance(p, DTensor)}
    return {name: part for name, part in known.items() if len(part) < device_mesh.ndim}


def agree_across_axes(module: nn.Module, parts: Mapping[str, Mapping[str, Any]], mesh: DeviceMesh, index: int) -> None:
    """Gives the parameters that styles have put on a part of ``mesh`` the values of rank ``index`` of each other axis: torch takes a source
    for each part."""
    with torch.no_grad():
        for name, part in parts.items():
            local = module.get_parameter(name).to_local()
            if not local.is_meta:
                others = mesh[tuple(axis for axis in as_mesh(mesh).axis_names if axis not in part)]
                source = int(others.mesh[(index,) * others.ndim])
                local.copy_(distribute(local, Layout.replicated(others.ndim), others, source))


def distribute_others(module: nn.Module, device_mesh: DeviceMesh, source: int | None) -> None:
    """Makes plain parameters of ``module`` replicated DTensors, in place."""
    mesh, named = as_mesh(device_mesh), dict(module.named_parameters(remove_duplicate=False))
    layouts = {name: layout_on(p, mesh) for name, p in named.items() if isinstance(p, DTensor)}
    shard_parameters(module, layouts, device_mesh, mesh_device(device_mesh), source)


def split_plan(plan: Any, mesh: DeviceMesh, module: nn.Module) -> tuple[dict[str, Styles], dict[Any, Any]]:
    """(the styles of each axis that has some, the one-word plans of others). Raises OptionError for anything else."""
    names = as_mesh(mesh).axis_names
    if plan is None or plan == AUTO:
        return {}, {}
    if isinstance(plan, Mapping) and plan and all(set(key if isinstance(key, tuple) else (key,)) <= set(names) for key in plan):
        words = {axis: one for axis, one in plan.items() if one is None or isinstance(one, str) or _is_word(one)}
        read_parallel(words or None, as_mesh(mesh))  # a word that is none is an error here, not at the first call
        return {axis: _checked(one, axis) for axis, one in plan.items() if axis not in words}, words
    if isinstance(plan, Mapping):
        _check_keys(plan, names, module)
    if _is_word(plan) or isinstance(plan, str):
        return {}, read_parallel(plan, as_mesh(mesh))
    styles = _checked(plan, None)
    if len(names) > 1:
        what = f"styles are for one axis, and the mesh has {', '.join(names)}"
        remedy = f"name the axis, parallelize_plan={{{names[-1]!r}: {{...}}}}, or pass a part of the mesh: mesh[{names[-1]!r}]"
        raise OptionError(what, where="parallelize_plan", remedy=remedy)
    return {names[0]: styles}, {}


def _check_keys(plan: Mapping[Any, Any], names: Sequence[str], module: nn.Module) -> None:
    """Raises OptionError for a key that can only be an axis, which the mesh lacks, and for names of modules beside axes."""
    keys = (key for key, one in plan.items() if isinstance(one, (*WORDS, Mapping)) and not _is_nested(key, one, module))
    axes = (axis for key in keys for axis in (key if isinstance(key, tuple) else (key,)))
    if (other := next((axis for axis in axes if axis not in names), None)) is not None:
        what = f"the mesh has no axis {other!r}{closest(other, names)}"
        raise OptionError(what, where="parallelize_plan", remedy=f"its axes are {', '.join(names)}")
    modules = {name for name, _ in module.named_modules()}
    axis = next((key for key in plan if key in names and key not in modules), None)
    beside = next((key for key, one in plan.items() if key not in names and not (isinstance(one, str) and one in (*NAMED, AUTO))), None)
    if axis is not None and beside is not None:
        what = f"{axis!r} is an axis of the mesh, and {beside!r} beside it is none: axes and names of modules cannot be mixed"
        remedy = f"name the axis for all: parallelize_plan={{{axis!r}: {{...}}}} with {beside!r} and the other names within"
        raise OptionError(what, where="parallelize_plan", remedy=remedy)


def _is_word(plan: Any) -> bool:
    """Whether it is for the planner: a one-word plan, or styles by their Hugging Face names."""
    return isinstance(plan, WORDS) or (isinstance(plan, Mapping) and bool(plan) and all(isinstance(one, str) for one in plan.values()))


def _checked(styles: Any, axis: str | None) -> Styles:
    where = "parallelize_plan" if axis is None else f"parallelize_plan[{axis!r}]"
    remedy = 'give {"layers.*.up": ColwiseParallel()}, one ParallelStyle, a word such as FullyShard(), or "auto"'
    if isinstance(styles, ParallelStyle):
        _refuse_pending_results("", styles, where)
        return styles
    if not isinstance(styles, Mapping):
        raise OptionError(f"a plan of styles is {a_kind(styles)}: {styles!r:.60}", where=where, remedy=remedy)
    found = _flat(styles)
    for name, style in found.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise OptionError(f"{name!r}: {style!r:.60} is not a module's name and a ParallelStyle", where=where, remedy=remedy)
        _refuse_pending_results(name, style, where)
    return found


def _refuse_pending_results(name: str, style: ParallelStyle, where: str) -> None:
    """Raises OptionError for a style by which ``name`` hands out each rank's part of a sum, or the whole module, "", returns a pending
    one. As a DTensor that another module of the model takes it is allowed."""
    of = getattr(style, "prepare_module_output", style)
    option = "desired_output_layouts" if hasattr(of, "desired_output_layouts") else "output_layouts"
    layouts = getattr(of, option, None)
    pending = any(isinstance(p, Partial) for p in (layouts if isinstance(layouts, (tuple, list)) else (layouts,)))
    if pending and (getattr(of, "use_local_output", True) or not name):
        said = f"{type(style).__name__}({option}=Partial()) of {name or 'the whole module'}"
        what = f"{said} hands out each rank's part of a sum, and a plan computes one whole value"
        remedy = f"give {option}=Replicate() or Shard(...)"
        remedy += "; or use_local_output=False, if a module of the model takes the result as a DTensor" if name else ""
        raise OptionError(what, where=where, remedy=remedy)


def _is_nested(name: Any, styles: Any, module: nn.Module) -> bool:
    """Whether it is a mapping of styles within the module ``name`` of ``module``, wildcards included, and not for an axis."""
    first = name.partition(".")[0] if isinstance(name, str) else None
    return isinstance(styles, Mapping) and first is not None and any(fnmatch(child, first) for child, _ in module.named_children())


def _flat(styles: Mapping[Any, Any]) -> dict[Any, Any]:
    """Styles by whole names: ``{"layers.0": {"up": ...}}`` as ``{"layers.0.up": ...}``, in their order."""
    found: dict[Any, Any] = {}
    for name, one in styles.items():
        if isinstance(name, str) and isinstance(one, Mapping):
            found.update({".".join(filter(None, (name, inner))): style for inner, style in _flat(one).items()})
        else:
            found[name] = one
    return found


def _as_torch_takes(styles: Styles) -> Any:
    return styles if isinstance(styles, ParallelStyle) else dict(styles)


@dataclass(eq=False, repr=False)
class DeferredForward(WaitingForward):
    """Plans for its first call, and makes way for the sharded forward."""

    device_mesh: DeviceMesh

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__signature__ = inspect.signature(self.replaced or type(self.module).forward.__get__(self.module))

    @torch.compiler.disable(reason=COMPILED)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_plain_parameters(self.module, self.device_mesh)
        leaves = [*args, *kwargs.values(), *self.module.parameters()]
        train = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        self.remove()
        try:
            parts = dissolve(self.module)
            self.settings = with_parts(self.settings, self.mesh, parts)
            self.open_parameters = [*self.open_parameters, *open_in(parts)]
            shard_module(self.module, self.device_mesh, self.settings, args, kwargs, train, open_parameters=self.open_parameters)
        except BaseException:
            self.module.forward = self
            raise
        if not self.reduces:
            leave_pending(self.module)
        return self.module.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> DeferredForward:
        copied = [copy.deepcopy(parameter, memo) for parameter in self.open_parameters]
        return DeferredForward(memo[id(self.module)], self.replaced, copied, self.mesh, self.settings, self.device_mesh)
