"""Private names of torch (2.13): avoid guards on symbols that do not affect the result of a computation.

What would replace it: operators' shape functions that ask no question whose answer does not matter.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.sizes.symbols import expression, is_symbolic, refusing_guards, surely, symbolic_kernels

MOST = 16
"""The most paths through a computation that are tried, one per sequence of answers."""

Answers = dict[sympy.Basic, bool]
FAKES_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class _NoCondition(Exception):
    """A number is requested, which has too many possible values to try."""


def without_needless_guards(mode: Any, make: Callable[[], Any]) -> Any:
    """The result of ``make`` on fakes of ``mode``, with guards only where the answer to a condition on symbols changes the result."""
    same = whatever_the_answers(mode.shape_env, mode, make)
    return same[0] if same else make()


def run_on_symbols(env: ShapeEnv, run: Callable[[], Any]) -> Any:
    """The result of ``run`` with the kernels that a device would use; or, if one of these needs a symbol of ``env`` as a number, with those
    written in Python, whose results may alias differently."""
    if not env.backed_var_to_val:
        return run()
    try:
        with refusing_guards(env), _quiet_fakes():
            return run()
    except Exception:  # torch's, of any kind
        with symbolic_kernels():
            return run()


@contextlib.contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Suppress torch's error logs for kernels that raise on fakes, here in attempts."""
    before, FAKES_LOG.disabled = FAKES_LOG.disabled, True
    try:
        yield
    finally:
        FAKES_LOG.disabled = before


def whatever_the_answers(env: ShapeEnv, mode: Any, make: Callable[[], Any]) -> tuple[Any, ...]:
    """(the result of ``make``,) if it is the same for all values of the symbols of ``env``: each undecided condition is answered both ways,
    and under ``oblivious`` no guard is added. () if results differ, an answer raises, or there are too many paths: guards are then needed.

    Strides of results that an answer makes empty are not compared. ``mode``: the fakes' mode; its cache is disabled, so that it keeps no
    results of answers that were only tried.
    """
    ways: list[Answers] = [{}]
    found: list[tuple[Any, Answers]] = []
    cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        while ways:
            if len(found) == MOST:
                return ()
            given = ways.pop()
            answers = dict(given)
            with _answering(env, answers):
                found.append((make(), answers))
            asked = list(answers.items())
            for number in range(len(given), len(asked)):
                question, answer = asked[number]
                ways.append({**dict(asked[:number]), question: not answer})
    except Exception:  # torch's, of any kind: a check that does not hold for this answer
        return ()
    finally:
        mode.cache_enabled = cached
    (first, _), *rest = found
    return (first,) if all(_alike(first, other, answers) for other, answers in rest) else ()


@contextlib.contextmanager
def _answering(env: ShapeEnv, answers: Answers) -> Iterator[None]:
    """Within it, conditions that ``env`` would guard on are answered from ``answers``; new ones as in the example, and added to them."""
    real, before = env.evaluate_expr, vars(env).get("evaluate_expr")

    def evaluate(expr: sympy.Basic, hint: Any = None, *args: Any, fallback_value: Any = None, **options: Any) -> Any:
        if fallback_value is not None or not expr.free_symbols or env._maybe_evaluate_static(expr) is not None:
            return real(expr, hint, *args, fallback_value=fallback_value, **options)
        if not isinstance(expr, (sympy.Rel, sympy.logic.boolalg.BooleanFunction)):  # sympy calls each symbol a Boolean
            raise _NoCondition
        if expr not in answers:
            answers[expr] = bool(env.guarding_hint_or_throw(expr) if hint is None else hint)
        return sympy.true if answers[expr] else sympy.false

    env.evaluate_expr = evaluate
    try:
        with _quiet_fakes():
            yield
    finally:
        del env.evaluate_expr
        if before is not None:
            env.evaluate_expr = before


def _alike(one: Any, other: Any, answers: Answers) -> bool:
    """Whether two results of an operator have the same dtypes, shapes and strides for all sizes; ``answers`` led to ``other``."""
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(_alike(a, b, answers) for a, b in zip(one, other, strict=True))
    if not isinstance(one, torch.Tensor):
        return one is None and other is None
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.dim() != other.dim():
        return False
    pairs = [*zip(one.shape, other.shape, strict=True)]
    if not _is_empty(other, answers):
        pairs += zip(one.stride(), other.stride(), strict=True)
    return all(surely(a == b) for a, b in pairs)


def _is_empty(value: torch.Tensor, answers: Answers) -> bool:
    """Whether the answers imply that the tensor has no elements."""
    if not is_symbolic(value.numel()):
        return False
    count = expression(value.numel())
    return answers.get(sympy.Eq(count, 0), False) or not answers.get(sympy.Ne(count, 0), True)
