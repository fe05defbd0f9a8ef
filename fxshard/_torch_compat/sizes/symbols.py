"""Symbolic sizes: torch's ShapeEnv, its SymInts and the guards that it records.

What would replace it: ``torch.export.Dim`` with access to the environment, and a list of the guards that it records.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    _ShapeEnvGuardError,
    free_unbacked_symbols,
    optimization_hint,
    statically_known_true,
    uninteresting_files,
)
from torch.fx.traceback import get_current_meta, preserve_node_meta, set_current_meta
from torch.utils import _stats
from torch.utils._sympy.functions import IntTrueDiv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fxshard._torch_compat.inductor.expression_calls import expression_as_calls
from fxshard._torch_compat.sizes.extremes import EXTREMES, extremes_reduced, without_extremes
from fxshard._torch_compat.sizes.whole_numbers import whole

if TYPE_CHECKING:
    from torch import fx

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
GuardRefused = _ShapeEnvGuardError
LARGEST = 2**62
_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")


warnings.filterwarnings("ignore", message="Raw Sym")  # graphs hold SymInts as arguments until a rank computes them


class SymbolEnv:
    """The symbols of one graph: a ShapeEnv that neither specialises sizes of 0 and 1 nor merges sizes that are equal in the example."""

    def __init__(self) -> None:
        self.shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.known: dict[str, torch.SymInt] = {}

    def symbol(self, name: str, hint: int, least: int = 0, most: int | None = None) -> torch.SymInt:
        """The symbol of that name, created at the first call; ``hint``: its value in the example."""
        if name not in self.known:
            from torch._dynamo.source import ConstantSource

            source, env = ConstantSource(name), self.shape_env
            symbol = env.create_symbol(
                hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, positive=True, do_not_specialize_zero_one=True
            )
            env._constrain_range(symbol, least, most if most is not None else LARGEST)
            self.known[name] = env.create_symintnode(symbol, hint=hint, source=source)
        return self.known[name]

    def number(self, name: str, hint: int) -> torch.SymInt:
        """A new symbol for an integer that is not a size and may be negative."""
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(name)
        symbol = self.shape_env.create_unspecified_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def value(self, expression: sympy.Basic, hint: Any) -> Any:
        """An expression of this environment's symbols as a SymInt, SymFloat or SymBool; a plain number if it has no symbols."""
        return symbolic_number(self.shape_env, expression, hint)


def symbolic_number(env: ShapeEnv, expression: sympy.Basic, hint: Any) -> Any:
    """An expression of the symbols of ``env`` as a SymInt, SymFloat or SymBool with the value ``hint`` in the example; a plain number if it
    has no symbols."""
    if isinstance(hint, bool):
        return env.create_symboolnode(expression) if expression.free_symbols else bool(expression)
    if not expression.free_symbols:
        return hint
    make = env.create_symintnode if isinstance(hint, int) else env.create_symfloatnode
    return make(expression, hint=hint)


@contextlib.contextmanager
def noting_lines(is_user_file: Callable[[str], bool], in_trace: Callable[[str], str | None]) -> Iterator[None]:
    """Within it, each guard is recorded with the line that caused it, in the function that Dynamo traces, and the calling line of the user.

    ``is_user_file``: whether a file is the user's; ``in_trace``: finds the user's line in the text of a stack trace.
    """
    noted = ShapeEnv._get_sloc

    def at_line(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(noted(self, *args, **kwargs))(None, _asking_line(is_user_file, in_trace))

    ShapeEnv._get_sloc = at_line
    try:
        yield
    finally:
        ShapeEnv._get_sloc = noted


_ASKING: ContextVar[str] = ContextVar("asking", default="")


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Within it, guards are recorded as caused by ``what`` on the user's line, instead of by a line of torch or fxshard."""
    token = _ASKING.set(what)
    try:
        yield
    finally:
        _ASKING.reset(token)


@contextlib.contextmanager
def at_node(node: fx.Node) -> Iterator[None]:
    """Within it, guards are recorded with the user's line of ``node``."""
    with preserve_node_meta(), set_current_meta(node):
        yield


def _asking_line(is_user_file: Callable[[str], bool], in_trace: Callable[[str], str | None]) -> str:
    """The place that caused a guard, like ``model.py:8 (torch/nn/...:560)``: ``file:line`` of the user's innermost function that Dynamo
    traces, or of the traced node; then, if different, of the innermost function that Dynamo traces (outside of Dynamo: of the innermost
    frame that does not handle symbols)."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    frame, outside, asked, user = sys._getframe(2), "", "", ""
    passed = {*uninteresting_files(), __file__, _stats.__file__}
    while frame is not None:
        translator = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "run") else None
        if isinstance(translator, InstructionTranslatorBase):
            asked = asked or _shortened(f"{translator.f_code.co_filename}:{translator.lineno}")
            if is_user_file(translator.f_code.co_filename):
                user = f"{translator.f_code.co_filename}:{translator.lineno}"
                break
        if not outside and frame.f_code.co_filename not in passed:
            outside = _shortened(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    asked = _ASKING.get() or asked or outside
    user = _shortened(user or in_trace(get_current_meta().get("stack_trace") or "") or asked)
    return user if asked in ("", user) else f"{user} ({asked})"


def _shortened(place: str) -> str:
    """A place in a file of torch or fxshard relative to the folder of installation; other places unchanged."""
    return next((place[len(root) :] for root in _INSTALLED if place.startswith(root)), place)


_INSTALLED = tuple(f"{Path(file).parents[depth]}{os.sep}" for file, depth in ((torch.__file__, 1), (__file__, 2)))


def captured_sizes(captured: fx.GraphModule, inputs: Sequence[Any]) -> dict[sympy.Symbol, torch.SymInt]:
    """Dynamo's symbols for the symbolic sizes of a captured graph's ``inputs`` -> these sizes."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    ends = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for node, value in zip(ends, inputs, strict=False):
        seen = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(seen, torch.Tensor) and isinstance(value, torch.Tensor):
            pairs = zip(seen.shape, value.shape, strict=False)
            found.update({s.node._expr: own for s, own in pairs if isinstance(s, torch.SymInt) and isinstance(own, torch.SymInt)})
    return found


def symbol_of(value: torch.SymInt) -> sympy.Symbol:
    """The original symbol of a size, even if the environment has replaced it since."""
    return value.node._expr


def ranges_of(limits: Sequence[tuple[torch.SymInt, int, int | None]]) -> dict[sympy.Symbol, ValueRanges[Any]]:
    """The ranges of sizes in the form of ``torch.export``; ``limits``: (size, least value, greatest value or None)."""
    return {symbol_of(size): ValueRanges(least, int_oo if most is None else most) for size, least, most in limits}


def noted_guards(env: ShapeEnv | None) -> list[tuple[sympy.Basic, str]]:
    """(guard, its place) for each guard on the symbols of ``env``."""
    return [] if env is None else [(guard.expr, _place(guard.sloc)) for guard in env.guards if guard.expr.free_symbols]


def _place(sloc: Any) -> str:
    """``file:line`` of the user's line, or of the line in torch or fxshard that caused a guard."""
    place = getattr(sloc, "maybe_user_loc", None) or getattr(sloc, "framework_loc", None) or sloc
    file, line = getattr(place, "filename", None), getattr(place, "lineno", None)
    return _shortened(f"{file}:{line}" if file else str(place))


def is_settled(symbol: sympy.Symbol, env: ShapeEnv | None) -> bool:
    """Whether ``env`` has replaced a symbol by a number or another expression."""
    return env is not None and symbol in env.replacements


ONE_THREAD = threading.RLock()
"""Held while functions of torch are patched for symbolic sizes: another thread would restore what this one still needs."""


@contextlib.contextmanager
def oblivious() -> Iterator[None]:
    """Within it, no decision depends on whether a size is 0 or 1 in the example; torch does what is valid for all sizes.

    torch's C++ tests contiguity with the example's sizes, but with expressions if sizes have no example. So ``has_hint`` answers False to
    C++, and truthfully to Python.
    """
    from torch.fx.experimental import _config

    from fxshard._torch_compat.convolution import convolutions_of_any_size

    with ONE_THREAD:
        before = SymNode.has_hint
        SymNode.has_hint = _has_hint_for_python
        try:
            with _config.patch(backed_size_oblivious=True), convolutions_of_any_size(), extremes_reduced():
                yield
        finally:
            SymNode.has_hint = before


_HAS_HINT = SymNode.has_hint


def _has_hint_for_python(self: SymNode) -> bool:
    """Distinguishes callers by the calling Python frame: only that of a Python caller has ``has_hint`` among its names."""
    return _HAS_HINT(self) if "has_hint" in sys._getframe(1).f_code.co_names else False


@contextlib.contextmanager
def symbolic_kernels() -> Iterator[None]:
    """Within it, operators whose C++ kernels do not support symbols use kernels written in Python.

    torch's context manager is active from its creation on, and stays active if contexts are left in a different order: then a wait for a
    collective holds the GIL for ever. So it is created and entered here in one step.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        yield


def shape_env_of(value: Any) -> ShapeEnv | None:
    """The environment of a tensor's symbolic sizes; None where all are numbers."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


@contextlib.contextmanager
def refusing_guards(env: ShapeEnv) -> Iterator[None]:
    """Within it, an operation that would add a guard raises GuardRefused."""
    with quiet_symbols(), env.error_on_new_guards():
        yield


def bounds_of(size: torch.SymInt) -> tuple[int, int | None]:
    """The least and the largest possible value of a size in its environment; None if it has no upper bound."""
    known = size.node.shape_env.bound_sympy(size.node.expr)
    least = int(known.lower) if known.lower.is_Integer else 0
    return least, int(known.upper) if known.upper.is_Integer and known.upper < LARGEST else None


_NUMBER = frozenset({int})


def are_numbers(sizes: Iterable[Any]) -> bool:
    """Whether all sizes are plain integers; called often, so without a loop in Python."""
    return _NUMBER.issuperset(map(type, sizes))


def is_symbolic(value: Any) -> bool:
    """Whether a number is an expression of backed symbols only, whose values in the example are known."""
    return isinstance(value, SYMBOLIC) and not _is_unknown(value.node.expr)


def is_unknown(value: Any) -> bool:
    """Whether a number has unbacked symbols, whose values only execution tells."""
    return isinstance(value, SYMBOLIC) and _is_unknown(value.node.expr)


@functools.lru_cache(maxsize=65536)
def _is_unknown(expr: sympy.Basic) -> bool:
    return bool(free_unbacked_symbols(expr))


def expression(value: Any) -> sympy.Basic:
    """The expression of a SymInt, SymFloat or SymBool, with the environment's replacements applied."""
    return value.node.expr


def plain(value: Any) -> Any:
    """A number, or the expression of a symbolic one; comparing expressions adds no guards."""
    return expression(value) if is_symbolic(value) else value


def hint_of(value: Any) -> Any:
    """The value of a symbolic number in the example."""
    if value.node.hint is not None:
        return value.node.hint
    expr = value.node.expr
    return optimization_hint(value) if expr.free_symbols else evaluated(expr, {})


def evaluated(expr: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """The value of an expression with its symbols replaced by ``values``: a number, or an expression if some values are expressions.

    Floats divided by zero give inf or nan, as on a device (the gradient of ``std`` of one row); integers raise ZeroDivisionError.
    Integers may have any length, whereas torch's powers end at 63 bits.
    """
    if (number := whole(expr, values)) is not None:
        return number
    settled = expr.free_symbols <= values.keys() and all(value.is_number for value in values.values())
    try:
        found = expr.xreplace(values) if values else expr
    except ZeroDivisionError:
        if not settled or expr.has(IntTrueDiv):
            raise
        found = None
    # A quotient is left where torch 2.15 takes a whole float for an integer: trunc(0 / 2) / 2.
    if found is None or (settled and found.has(int_oo, IntTrueDiv)):
        return expression_as_calls(expr, {symbol: int(value) for symbol, value in values.items()})
    if found.free_symbols:
        return found
    if found in (sympy.true, sympy.false) or isinstance(found, (sympy.logic.boolalg.Boolean, sympy.Rel)):
        return bool(found)
    return int(found) if found.is_integer or isinstance(found, sympy.Integer) else float(found)


def surely(condition: Any) -> bool:
    """Whether a condition is known to hold for all sizes; adds no guard."""
    if isinstance(condition, bool):
        return condition
    if statically_known_true(condition):
        return True
    if not isinstance(condition, torch.SymBool) or not condition.node.expr.has(*EXTREMES):
        return False
    env = condition.node.shape_env
    return env._maybe_evaluate_static(without_extremes(condition.node.expr, env)) == sympy.true


def magnitude(number: int | torch.SymInt, of_symbol: int) -> float:
    """A bound on the absolute value of a sum of products of sizes, each at most ``of_symbol``; infinity for other expressions."""
    return abs(number) if isinstance(number, int) else _magnitude(number.node.expr, of_symbol)


def _magnitude(expr: Any, of_symbol: int) -> float:
    if expr.is_Integer:
        return abs(int(expr))
    if expr.is_Symbol:
        return of_symbol
    parts = [_magnitude(part, of_symbol) for part in expr.args]
    return sum(parts) if expr.is_Add else math.prod(parts) if expr.is_Mul else math.inf


def marked_dims(value: torch.Tensor) -> dict[int, tuple[int, int | None]]:
    """Dims marked with ``torch._dynamo.mark_dynamic`` or ``maybe_mark_dynamic``, with their least and largest size (None: unbounded).

    For a dim marked several times, the ranges are intersected.
    """
    found: dict[int, tuple[int, int | None]] = {dim: (1, None) for mark in _MARKS for dim in getattr(value, mark, ())}
    for one in getattr(value, "_dynamo_dynamic_range", ()):
        least, most = found.get(one.dim, (1, None))
        ends = [end for end in (most, one.max) if end is not None]
        found[one.dim] = max(least, one.min or 1), min(ends, default=None)
    return {dim % value.dim(): found[dim] for dim in sorted(found)}


@contextlib.contextmanager
def quiet_symbols() -> Iterator[None]:
    """Suppress torch's log lines about symbols that are specialised."""
    import logging

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
