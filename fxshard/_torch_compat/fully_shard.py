"""Private names of torch's FSDP2 (2.13, 2.15): takes ``fully_shard`` off a module, whose parameters stay the DTensors that they are.

What would replace it: an inverse of ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The attributes by which Dynamo knows the modules of FSDP2."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether torch's ``fully_shard`` was applied to ``module`` itself; ``replicate``, which has a subclass of its own, does not count."""
    return isinstance(module, FSDPModule) and type(module)._orig_cls_mro_index == FSDPModule._orig_cls_mro_index


def sharded_parameters(module: Any) -> list[DTensor]:
    """The parameters that ``fully_shard`` shards together with ``module``."""
    return [parameter.sharded_param for group in fully_shard.state(module)._fsdp_param_groups for parameter in group.fsdp_params]


def sharded_from_outside(model: nn.Module) -> list[str]:
    """The names of the modules of ``model`` whose parameters a ``fully_shard`` shards that was applied to modules outside of ``model`` too:
    to one around it, or to several together."""
    inside = {module: name for name, module in model.named_modules()}
    states = [fully_shard.state(m) for m in list(_composable_state._module_state_mapping) if is_fully_sharded(m)]
    groups = [group for state in states if not inside.keys() >= set(state._modules) for group in state._fsdp_param_groups]
    holders = [parameter._module_info.module for group in groups for parameter in group.fsdp_params]
    return list(dict.fromkeys(inside[module] for module in holders if module in inside))


def more_than_layouts(module: Any) -> Iterator[tuple[str, str]]:
    """(what, remedy) for what ``fully_shard`` was asked to do that neither layouts of parameters nor a plan say.

    What a plan decides itself is no more: when to gather and to free, in what order, and prefetching.
    """
    policy, groups = fully_shard.state(module)._mp_policy, fully_shard.state(module)._fsdp_param_groups
    if any(t is not None for t in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)):
        yield "an mp_policy", "leave mp_policy out, and pass mixed_precision=fxshard.MixedPrecision(...) to parallelize"
    if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
        yield "an offload_policy", "leave offload_policy out, and pass offload= to parallelize"
    if any(group.gradient_divide_factor is not None for group in groups):
        yield "a gradient_divide_factor", "divide the loss instead: gradients are those of the loss of the whole batch"
    if any(group._all_reduce_hook is not None for group in groups):
        yield "an all_reduce_hook", "leave it out: the plan reduces gradients"
    if any(type(g._all_gather_comm) is not DefaultAllGather or type(g._reduce_scatter_comm) is not DefaultReduceScatter for g in groups):
        yield "communication of its own", "leave set_custom_all_gather and set_custom_reduce_scatter out: the plan communicates"
    if wrapped := [name for name, value in vars(module).items() if _is_forward_method(value)]:
        yield f"register_fsdp_forward_method of {', '.join(wrapped)}", "leave it out: only forward is sharded, and what it calls"
    if not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        yield "set_requires_gradient_sync(False)", "set it to True; fxshard.no_sync leaves gradients unreduced"
    if any(_is_pending(parameter) for group in groups for parameter in group.fsdp_params):
        yield "gradients that are not reduced yet", "run the last backward of the step with set_requires_gradient_sync(True)"


def split_by_two_axes(module: Any) -> list[DTensor]:
    """The parameters of which ``fully_shard`` of ``module`` shards a dim that tensor parallelism shards first (``_StridedShard``)."""
    return [p for p in sharded_parameters(module) if any(type(placement) is _StridedShard for placement in p.placements)]


def placements_anew(parameter: DTensor) -> tuple[Placement, ...]:
    """The placements of ``parameter`` with ``_StridedShard`` moved to another dim, the largest that no axis shards, so that a gather on its
    axis is one step; of a vector, which has no other, the first axis cuts first, as for other DTensors."""
    taken = {p.dim for p in parameter.placements if isinstance(p, Shard | _StridedShard) and type(p) is not _StridedShard}
    placements: list[Placement] = []
    for placement in parameter.placements:
        if type(placement) is _StridedShard:
            free = [dim for dim in range(parameter.dim()) if dim not in taken] or [placement.dim]
            placement = Shard(max(free, key=lambda dim: parameter.shape[dim]))
            taken.add(placement.dim)
        placements.append(placement)
    return tuple(placements)


def lay_out_anew(parameter: DTensor) -> Callable[[], None]:
    """Moves ``parameter`` to ``placements_anew``. It stays the same object. Returns what puts it back.

    All ranks of the mesh must call it: it communicates.
    """
    before = parameter._spec, parameter._local_tensor
    moved = parameter.detach().redistribute(placements=placements_anew(parameter))
    parameter._spec, parameter._local_tensor = moved._spec, moved._local_tensor

    def put_back() -> None:
        parameter._spec, parameter._local_tensor = before

    return put_back


def take_off(module: Any) -> Callable[[], None]:
    """Undoes ``fully_shard`` on ``module`` itself, its hooks, state and class; the parameters that FSDP shards are registered again.

    Returns what puts all of it back; where several modules are sharded together, in the reverse of the order in which it was taken off.
    """
    state, cls, attributes = fully_shard.state(module), type(module), vars(module)
    module.reshard()
    handles = list(_handles(state))
    dicts = [d for handle in handles for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref) if (d := ref()) is not None]
    hooks = [(d, dict(d)) for d in dicts]
    marks = [(vars(part), mark, vars(part)[mark]) for part in module.modules() for mark in MARKS if mark in vars(part)]
    known, states, registered = _composable_state._module_state_mapping[module], attributes[STATE_KEY], dict(attributes[REGISTRY_KEY])

    def put_back() -> None:
        for d, before in hooks:
            since = {key: hook for key, hook in d.items() if key not in before}
            d.clear()
            d.update({**before, **since})
        for of_part, mark, value in marks:
            of_part[mark] = value
        _composable_state._module_state_mapping[module] = known
        attributes[STATE_KEY] = states
        attributes[REGISTRY_KEY].update(registered)
        module.__class__ = cls

    for handle in handles:
        handle.remove()
    for of_part, mark, _ in marks:
        of_part.pop(mark, None)
    del _composable_state._module_state_mapping[module]
    attributes[STATE_KEY] = {function: of for function, of in states.items() if of is not state}
    del attributes[REGISTRY_KEY][fully_shard.__name__]
    module.__class__ = cls.__mro__[FSDPModule._orig_cls_mro_index]
    return put_back


def _handles(state: Any) -> Iterator[Any]:
    """The handles of all hooks that FSDP has registered; modules that are sharded together share them, and may remove them twice."""
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        yield from getattr(handle, "handles", (handle,))  # a handle of handles if several modules are sharded together
    for group in state._fsdp_param_groups:
        yield from (parameter._post_load_hook_handle for parameter in group.fsdp_params)
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()


def _is_forward_method(value: Any) -> bool:
    """Whether ``register_fsdp_forward_method`` made this attribute: the code of its methods lies in that function."""
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return code is not None and code in register_fsdp_forward_method.__code__.co_consts


def _is_pending(parameter: Any) -> bool:
    """Whether FSDP keeps a gradient of ``parameter`` that it has not reduced."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
