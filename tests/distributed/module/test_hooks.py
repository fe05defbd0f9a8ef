"""Hooks of a module and of its submodules, added before or after parallelize, on two ranks, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.errors import RunError, TraceError
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
Seen = list[Any]
Register = Callable[[Any, Seen], Any]
PINS = {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"}


def net() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def batch(rows: int = 3) -> Tensor:
    return torch.linspace(-1, 1, 4 * rows).view(rows, 4).cos()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def shard(model: nn.Module, compiler: str = "eager", **options: Any) -> Any:
    return fxshard.parallelize(model, (batch().requires_grad_(),), mesh(), compiler=compiler, pins=PINS, **options)


def close(have: Any, want: Any, rtol: float = 1e-9) -> None:
    if isinstance(want, (tuple, list)):
        assert len(have) == len(want)
        for one, other in zip(have, want, strict=True):
            close(one, other, rtol)
        return
    if not isinstance(want, Tensor):
        assert have == want or abs(have - want) <= rtol * abs(want)
        return
    have = have.full_tensor() if isinstance(have, DTensor) else have
    assert have.shape == want.shape and (have - want).double().norm() <= rtol * max(float(want.double().norm()), 1e-6)


def step(model: Any) -> list[Any]:
    """The output of a step, and the gradients of the input and the parameters."""
    model.zero_grad()
    x = batch().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def square(module: Any, args: Any, kwargs: Any) -> Any:
    return (args[0].square(),), kwargs


ON_SUBMODULES: dict[str, Register] = {
    "value": lambda m, seen: m[0].register_forward_hook(lambda module, args, out: out.sin()),
    "arguments": lambda m, seen: m[2].register_forward_pre_hook(square, with_kwargs=True),
    "kept": lambda m, seen: m[0].register_forward_hook(lambda module, args, out: seen.append((args[0], out)), always_call=True),
    "kept arguments": lambda m, seen: m[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach())),
    "a number": lambda m, seen: m[0].register_forward_hook(lambda module, args, out: seen.append(out.norm().item())),
    "all modules": lambda m, seen: register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__)),
    "gradients": lambda m, seen: m[2].register_full_backward_hook(lambda module, given, out: seen.append((given, out))),
    "all gradients": lambda m, seen: register_module_full_backward_hook(lambda module, given, out: seen.append((given, out))),
}
GRADIENTS_BEFORE: Register = lambda m, seen: m[0].register_full_backward_pre_hook(lambda module, out: seen.append(out))  # noqa: E731
ON_THE_MODULE: dict[str, Register] = {
    "value": lambda m, seen: m.register_forward_hook(lambda module, args, kwargs, out: out.sin(), with_kwargs=True),
    "arguments": lambda m, seen: m.register_forward_pre_hook(square, with_kwargs=True),
    "kept": lambda m, seen: m.register_forward_hook(lambda module, args, out: seen.append(out.detach())),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda module, given, out: (seen.append(out[0]), (given[0] * 2,))[1]),
    "backward before": lambda m, seen: m.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,)),
}


def steps_with_and_without(model: Any, register: Register, begin: Callable[[Any], Any], after: bool) -> tuple[list[Any], Seen, list[int]]:
    """Runs steps with the hook, without it, and with it again. Returns their results, what the hook saw, and numbers of programs made.

    ``begin`` parallelizes the model, if at all, once the hook is there; if ``after``, the model is parallelized already.
    """
    seen: Seen = []
    before = programs(model)
    handle = register(model, seen)
    if not after:
        begin(model)
    steps, counts = [step(model), step(model)], [programs(model) - before]
    handle.remove()
    steps.append(step(model))
    if after:
        handle = register(model, seen)
        steps.append(step(model))
        handle.remove()
    return steps, seen, [*counts, programs(model) - before]


def programs(model: Any) -> int:
    return len(getattr(model.forward, "programs", ()))


def compare_with_one_device(register: Register, model: Any = None) -> list[int]:
    """The hook is there before a new model is parallelized, or is added to ``model``, which is parallelized and has run already."""
    after = model is not None
    have, saw, counts = steps_with_and_without(model if after else net(), register, shard, after)
    want, expected, _ = steps_with_and_without(net(), register, lambda m: None, after)
    for one, other in zip(have, want, strict=True):
        close(one, other)
    close(saw, expected)
    return counts


class Together:
    """The handle of several hooks."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def together(*registers: Register) -> Register:
    return lambda model, seen: Together([register(model, seen) for register in registers])


def hooks_of_submodules_before() -> None:
    """Removing hooks makes another program."""
    hooks = together(*(ON_SUBMODULES[name] for name in ("value", "arguments", "kept")), GRADIENTS_BEFORE)
    assert compare_with_one_device(hooks) == [1, 2]


def hooks_of_submodules_after() -> None:
    """A hook makes another program, except that "a number" needs the values that "kept" needed; without it the first one runs again."""
    model = shard(net())
    step(model)
    for name, register in ON_SUBMODULES.items():
        assert compare_with_one_device(register, model) == [int(name != "a number")] * 2, name


def hooks_of_the_module() -> None:
    """These hooks run outside of the program: there is one program with and without them."""
    assert compare_with_one_device(together(*ON_THE_MODULE.values())) == [1, 1]
    model = shard(net())
    step(model)
    for name, register in ON_THE_MODULE.items():
        assert compare_with_one_device(register, model) == [0, 0], name


def hooks_compiled() -> None:
    """Through Inductor, in float64. The loss also depends on a tensor that a hook kept, which is an output of the program."""
    seen: list[Seen] = [[], []]
    models = [net(), net()]
    for model, kept in zip(models, seen, strict=True):
        ON_SUBMODULES["kept"](model, kept)
        ON_SUBMODULES["gradients"](model, kept)
    shard(models[0], "inductor")
    for model, kept in zip(models, seen, strict=True):
        (model(batch().requires_grad_()).sum() + kept[0][1].cos().sum()).backward()
    close([p.grad for p in models[0].parameters()], [p.grad for p in models[1].parameters()])
    close(*seen)


def hooks_at_any_size() -> None:
    """Tensors that hooks keep have the sizes of their call, with one program for all sizes; so do those of backward hooks."""
    register = together(ON_SUBMODULES["kept"], ON_SUBMODULES["gradients"])
    models, seen = [net(), net()], [[], []]
    shard(models[0])
    for model, kept in zip(models, seen, strict=True):
        register(model, kept)
        for rows in (4, 6, 8, 6):
            model.zero_grad()
            model(batch(rows).requires_grad_()).square().sum().backward()
    close(*seen)
    close([p.grad for p in models[0].parameters()], [p.grad for p in models[1].parameters()])
    assert len(models[0].forward.programs) <= 3


def hooks_of_parameters() -> None:
    """Hooks added after parallelize see DTensor gradients. Those added before are refused, because they would be lost."""
    models, seen = [net(), net()], [[], []]
    shard(models[0])
    for model, kept in zip(models, seen, strict=True):
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.append(p.grad.clone()))
    close(step(models[0]), step(models[1]))
    close(*seen)
    for register in (lambda p: p.register_hook(print), lambda p: p.register_post_accumulate_grad_hook(print)):
        model = net()
        register(model[0].weight)
        with pytest.raises(RunError, match=r"parameter 0.weight has a hook(.|\n)*after parallelize"):
            shard(model)


def hooks_of_parameters_before_the_first_call() -> None:
    """Parameters that the first call moves keep the hooks and attributes that they were given before it; so do those that a later style
    shards."""
    for word in ("fsdp", "ddp"):
        models, seen = [net(), net()], [[], []]
        fxshard.parallelize_module(models[0], mesh(), {"tp": word}, compiler="eager")
        handles = [step_in_backward(model, kept) for model, kept in zip(models, seen, strict=True)]
        same_after_a_step(*models)
        close(*map(sorted, seen))
        assert len(seen[0]) == 4 and all(p.called == name for name, p in models[0].named_parameters())
        for of_model in handles:
            for handle in of_model:
                handle.remove()
        same_after_a_step(*models)
        assert len(seen[0]) == 4
    models, seen = [net(), net()], [[], []]
    fxshard.parallelize_module(models[0], mesh(), compiler="eager")
    for model, kept in zip(models, seen, strict=True):
        step_in_backward(model, kept)
    fxshard.parallelize_module(models[0], mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}, compiler="eager")
    same_after_a_step(*models)
    close(*map(sorted, seen))


def same_after_a_step(*models: Any) -> None:
    for model in models:
        model(batch()).square().sum().backward()
    close(*([v for p in model.parameters() for v in (p.detach(), p.grad)] for model in models))


def step_in_backward(model: Any, kept: Seen) -> list[Any]:
    """Doubles each gradient, and steps as soon as it is known; ``kept``: the names of the parameters that were stepped."""
    handles = []
    for name, parameter in model.named_parameters():
        parameter.called, optimizer = name, torch.optim.SGD([parameter], 0.1)
        after = lambda p, optimizer=optimizer: (optimizer.step(), kept.append(p.called), None)[-1]  # noqa: E731
        handles += [parameter.register_hook(lambda grad: grad * 2), parameter.register_post_accumulate_grad_hook(after)]
    return handles


KEPT: Seen = []
REFUSED: dict[str, Callable[[Any], Any]] = {
    "changes a tensor in place": lambda out: (KEPT.append(1), out.mul_(2), None)[2],
    "returns Tensor, but could not be captured": lambda out: (print(), out * 2)[1],
    "asks for the gradient of a value": lambda out: KEPT.append(out.register_hook(print)),
    "asks for the gradient": lambda out: (KEPT.append(out), out.retain_grad())[1],
}


class CheckpointedLayer(nn.Module):
    """Calls its layer under torch.utils.checkpoint, in a subgraph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def refused() -> None:
    within = CheckpointedLayer()
    fxshard.parallelize(within, (batch(),), mesh(), compiler="eager")
    within.layer.register_forward_hook(lambda module, args, out: KEPT.append(out))
    with pytest.raises(TraceError, match=r"the forward hook .* of layer .* within torch.utils.checkpoint"):
        within(batch())
    model = shard(net())
    handle = model[0].register_forward_hook(lambda *_: None) if dist.get_rank() == 0 else model.register_forward_hook(lambda *_: None)
    with pytest.raises(RunError, match=r"the ranks differ in hooks: rank 0: forward hook of 0; rank 1: \(none\)(.|\n)*on all ranks"):
        model(batch())
    handle.remove()
    for said, body in REFUSED.items():
        handle = model[0].register_forward_hook(lambda module, args, out, body=body: body(out))
        with pytest.raises(RunError, match=f"the forward hook .* of 0 {said}") as caught:
            model(batch())
        assert "on the parallelized module itself" in str(caught.value)
        handle.remove()
    close(step(model), step(net()))
    handle = model[2].register_full_backward_hook(lambda module, given, out: given)
    with pytest.raises(RunError, match=r"the backward hook .* of 2 returns gradients(.|\n)*hooks of parameters"):
        model(batch()).sum().backward()
    model[0].register_backward_hook(print)
    with pytest.raises(TraceError, match=r"the backward hook print of 0 would not be called(.|\n)*register_full_backward_hook"):
        model(batch())
    model[0]._backward_hooks.clear()
    with torch.no_grad():
        close(model(batch()), net()(batch()))
    handle.remove()
    close(step(model), step(net()))


def the_hook_of_a_copy() -> None:
    """A hook that is a bound method is bound to the copy, and stores its tensors there."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 3), []
            self.layer.register_forward_hook(self.keep)

        def keep(self, module: Any, args: Any, out: Tensor) -> None:
            self.kept.append(out.detach())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sin() + self.kept[-1]

    net()
    model = Keeps()
    reference = copy.deepcopy(model)
    fxshard.parallelize(model, (batch(),), mesh(), compiler="eager", pins={"layer.weight": "S(1)"})
    other = copy.deepcopy(model)
    for rows in (3, 5):
        for one in (model, other):
            close(one(batch(rows)), reference(batch(rows)))
    assert len(model.kept) == len(other.kept) == 2
    close(other.kept, reference.kept[::2])


found, test_two_ranks = two_ranks(
    hooks_of_submodules_before,
    hooks_of_submodules_after,
    hooks_of_the_module,
    hooks_compiled,
    hooks_at_any_size,
    hooks_of_parameters,
    hooks_of_parameters_before_the_first_call,
    refused,
    the_hook_of_a_copy,
)
