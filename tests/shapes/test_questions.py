"""A kernel's question about a symbolic size becomes a guard only if the answer changes the result."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fxshard._torch_compat.sizes.needless_guards import whatever_the_answers
from fxshard._torch_compat.sizes.symbols import SymbolEnv, expression, oblivious, symbolic_kernels

Make = Callable[[torch.Tensor], torch.Tensor]


def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.numel() == 0 or x.shape[0] == 5 else x + 1


def shorter(x: torch.Tensor) -> torch.Tensor:
    return x if x.numel() == 0 else x[:, :1]


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.shape[0] > 3 else x.t().contiguous().t()


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.long() if x.shape[0] > 3 else x


def refuses(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] != 3)
    return x


def number(x: torch.Tensor) -> torch.Tensor:
    return x * int(x.shape[0])


def many(x: torch.Tensor) -> torch.Tensor:
    return x if [k for k in range(10, 30) if x.shape[0] == k] else x.clone()


def shard(env: SymbolEnv, size: int) -> torch.Tensor:
    """A tensor of ``size - 4`` rows, or of none."""
    return torch.empty(torch.sym_max(env.symbol("n", size) - 4, 0), 3)


def asked(make: Make, size: int = 12) -> tuple[tuple[torch.Tensor, ...], SymbolEnv]:
    env = SymbolEnv()
    mode = FakeTensorMode(shape_env=env.shape_env)
    with oblivious(), mode, symbolic_kernels():
        x = shard(env, size)
        return whatever_the_answers(env.shape_env, mode, lambda: make(x)), env


def test_no_guard_if_all_answers_give_the_same_result() -> None:
    """Shapes stay symbolic and no guard is added. Questions asked afterwards add guards as usual."""
    for size in (12, 9, 4, 1):
        (value,), env = asked(same, size)
        n = env.known["n"]
        assert not env.shape_env.guards and expression(value.shape[0]) == expression(torch.sym_max(n - 4, 0))
        assert bool(n == size) and len(env.shape_env.guards) == 1


@pytest.mark.parametrize("make", [shorter, turned, other_dtype, refuses, number, many], ids=lambda one: one.__name__)
def test_no_result_if_answers_give_different_ones(make: Make) -> None:
    found, env = asked(make)
    assert found == () and not env.shape_env.guards


def test_strides_of_empty_tensors() -> None:
    """Torch's kernel returns a copy with the input's strides if the input is empty, and a contiguous tensor otherwise."""
    (value,), env = asked(lambda x: torch.ops.aten.roll.default(x.t(), [1], [0]))
    assert value.is_contiguous() and not env.shape_env.guards
    assert asked(lambda x: x.t().clone() if x.shape[0] == 5 else x.t().contiguous())[0] == ()


def test_an_error_for_one_answer_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = asked(lambda x: torch.ops.aten.topk.default(x, 2, 0)[0])
    assert found == () and not [one for one in caplog.records if one.name == "torch._subclasses.fake_tensor"]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_python_kernels_are_enabled_only_in_the_context() -> None:
    def on() -> bool:
        return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))

    made = symbolic_kernels()
    assert not on()
    with symbolic_kernels(), made:
        assert on()
    assert not on()


def test_nested_questions() -> None:
    env = SymbolEnv()
    mode = FakeTensorMode(shape_env=env.shape_env)
    with oblivious(), mode, symbolic_kernels():
        x = shard(env, 12)

        def within() -> torch.Tensor:
            assert whatever_the_answers(env.shape_env, mode, lambda: same(x))
            return same(x)

        assert whatever_the_answers(env.shape_env, mode, within) and not env.shape_env.guards


def test_trials_are_not_cached() -> None:
    """Results for assumed answers do not enter the cache of fake tensors: the same call made normally adds a guard."""
    env = SymbolEnv()
    mode = FakeTensorMode(shape_env=env.shape_env)
    with oblivious(), mode, symbolic_kernels():
        x = shard(env, 12).t()
        kept = FakeTensorMode.cache_info().size
        assert whatever_the_answers(env.shape_env, mode, lambda: torch.ops.aten.roll.default(x, [1], [0])) and mode.cache_enabled
        assert FakeTensorMode.cache_info().size == kept and not env.shape_env.guards
        torch.ops.aten.roll.default(x, [1], [0])
        assert len(env.shape_env.guards) == 1
