"""Guards on sizes for in-place writes to memory that a reshape or ``contiguous`` shares with its input at some sizes only.

For symbolic sizes such a call is traced as a copy. torch returns a view at sizes for which no copy is needed (``x.T.contiguous()`` of one
row), so that a write to one of the two changes the other. Where that would
change a result, a guard assumes what holds in the example: that the memory is shared, or that it is not.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import HigherOrderOperator, TorchDispatchMode, pytree
from fxshard._torch_compat.fakes import storage_key
from fxshard._torch_compat.operators import schema_of
from fxshard._torch_compat.sizes.symbols import asking, at_node, hint_of, is_unknown, shape_env_of, symbolic_number
from fxshard.passes.trace.functions.contiguity import is_contiguous_if, is_viewed_if
from fxshard.passes.trace.functions.reshapes import RESHAPES
from fxshard.passes.trace.rewrites.probe import probe

VIEWS = frozenset({"reshape", "reshape_as", "flatten"})
CONTIGUOUS = frozenset({"contiguous", "ravel"})
ORDERS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}
"""Memory formats -> their dims from the outermost to the innermost."""
IN_PLACE = {"i" + name.rstrip("_") for name in operator.__all__} & {*operator.__all__}
ASSIGNMENTS = frozenset(getattr(operator, name) for name in (*IN_PLACE, "setitem"))
METADATA = ("size", "stride", "numel", "storage_offset", "is_", "sym_", "dim")
"""Beginnings of names of operators that read no elements."""


@dataclass(frozen=True)
class Copy:
    """A call that is a copy in the trace. ``base``, ``made``: its input and its result; ``shared``: when torch makes no copy."""

    node: fx.Node
    base: torch.Tensor
    made: torch.Tensor

    def shared(self) -> sympy.Basic:
        name = _name(self.node)
        if name in VIEWS:
            return is_viewed_if(self.base.shape, self.base.stride(), self.made.shape)
        wanted = next((a for a in (*self.node.args, *self.node.kwargs.values()) if isinstance(a, torch.memory_format)), None)
        order = ORDERS.get(wanted, range(self.base.dim())) if wanted is not None else range(self.base.dim())
        return is_contiguous_if([self.base.shape[d] for d in order], [self.base.stride(d) for d in order])


def guard_shared_memory(captured: fx.GraphModule, flat_args: Sequence[Any], fresh: Callable[[Any], Any]) -> None:
    """Adds the guards for a graph that Dynamo captured, with the user's line, to the symbols of ``flat_args``.

    ``fresh``: makes a fake like one of ``flat_args`` that the run may change. Nothing is run if no size is symbolic or nothing is
    written in place.
    """
    env = next((found for a in flat_args if (found := shape_env_of(a)) is not None), None)
    nodes = captured.graph.nodes
    if env is None or not any(_name(n) in VIEWS | CONTIGUOUS for n in nodes) or not any(map(_may_write, nodes)):
        return
    runs: list[_Run] = []

    def run(module: fx.GraphModule, args: Sequence[Any]) -> Any:
        runs.append(_Run(module))
        return runs[-1].run(*args)

    probe(captured, [fresh(a) for a in flat_args], run=run)
    for copy in runs[-1].memory.shown:
        with asking("memory that an in-place write shares at some sizes"), at_node(copy.node):
            _assume(env, copy.shared())


def missed_writes(captured: fx.GraphModule, flat_args: Sequence[Any], copies: Collection[Callable[..., Any]]) -> list[fx.Node]:
    """The calls of functions in ``copies`` whose result shares memory with their argument on one device and not in this graph, where a
    write to one of the two would show in the other. ``flat_args``: fakes that the run may change."""
    if not any(map(_may_write, captured.graph.nodes)):
        return []
    runs: list[_Run] = []

    def run(module: fx.GraphModule, args: Sequence[Any]) -> Any:
        runs.append(_Run(module, lambda node: node.target in copies))
        return runs[-1].run(*args)

    probe(captured, flat_args, run=run)
    return [copy.node for copy in runs[-1].memory.shown]


def _assume(env: Any, condition: sympy.Basic) -> None:
    """Adds guards: that ``condition``, a conjunction, does not hold; or, if it holds in the example, the sizes that make it hold."""

    def holds(term: sympy.Basic) -> bool:
        here = symbolic_number(env, term, True)
        return here if isinstance(here, bool) else bool(hint_of(here))

    clauses = sympy.And.make_args(condition)
    if all(map(holds, clauses)):
        terms = [min(filter(holds, sympy.Or.make_args(clause)), key=lambda term: len(term.free_symbols)) for clause in clauses]
        fixed = sorted({symbol for term in terms for symbol in term.free_symbols}, key=str)
        known = [sympy.Eq(symbol, hint_of(env.create_symintnode(symbol, hint=None))) for symbol in fixed]
    else:
        known = list(sympy.And.make_args(sympy.to_nnf(sympy.Not(condition), simplify=False)))
    for part in known:
        bool(symbolic_number(env, part, True))


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _may_write(node: fx.Node) -> bool:
    """Whether a call may write in place, by its name and arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name, schema = _name(node), schema_of(node.target)
    named = name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")
    named = named or node.target in ASSIGNMENTS
    flagged = any(a is True for a in node.args) or node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    higher = isinstance(node.target, HigherOrderOperator)
    return named or flagged or higher or (schema is not None and schema.is_mutable)


class _Run(fx.Interpreter):
    """Runs a captured graph on fakes and follows which memory is copied, written and read."""

    def __init__(self, module: fx.GraphModule, is_copy: Callable[[fx.Node], bool] = lambda node: _name(node) in VIEWS | CONTIGUOUS) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.memory, self.is_copy = _Memory(), is_copy

    def run(self, *args: Any, **options: Any) -> Any:
        with self.memory:
            results = super().run(*args, **options)
        ends = (results, args, [*self.module.parameters()], [*self.module.buffers()])
        self.memory.read(_tensors(ends))
        return results

    def run_node(self, n: fx.Node) -> Any:
        if not self.is_copy(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        base = next(iter(_tensors((args, kwargs))), None)
        function = getattr(torch.Tensor, n.target) if isinstance(n.target, str) else n.target
        made = RESHAPES[function](None, *args, **kwargs) if function in RESHAPES else NotImplemented
        if made is NotImplemented:
            made = super().run_node(n)
        if base is not None and storage_key(base) != storage_key(made) and not any(map(is_unknown, (*base.shape, *made.shape))):
            self.memory.add(Copy(n, base, made))
        return made


class _Memory(TorchDispatchMode):
    """Follows which memory operators write and read, of copies and of the tensors that they copy.

    Copies form trees. A write to one memory of a tree is missing in all others that exist then; it shows once one of those is read.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Copy] = {}
        """By the memory of the copy."""
        self.known: set[int] = set()
        self.missing: dict[int, list[Copy]] = {}
        """The copies between a memory and a write that it misses, by the memory."""
        self.shown: dict[Copy, None] = {}

    def add(self, copy: Copy) -> None:
        self.copies[storage_key(copy.made)] = copy
        self.known.update((storage_key(copy.base), storage_key(copy.made)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.known:
            written = _written(func, args, kwargs or {})
            if _reads(func):
                self.read(_tensors((args, kwargs)))
            self._write({storage_key(t) for t in written} & self.known)
        return result

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        for key in {storage_key(t) for t in tensors} & self.missing.keys():
            self.shown.update(dict.fromkeys(self.missing.pop(key)))

    def _write(self, keys: set[int]) -> None:
        for key, other in itertools.product(keys, self.known):
            between = self._between(key, other)
            if between:
                self.missing.setdefault(other, []).extend(between)

    def _between(self, one: int, other: int) -> list[Copy]:
        """The copies on the way from one memory to another; none if neither comes from the other's tree."""
        up, down = self._above(one), self._above(other)
        roots = [storage_key(way[-1].base) if way else key for way, key in ((up, one), (down, other))]
        return [copy for copy in (*up, *down) if (copy in up) != (copy in down)] if roots[0] == roots[1] else []

    def _above(self, key: int) -> list[Copy]:
        way = []
        while key in self.copies:
            way.append(self.copies[key])
            key = storage_key(way[-1].base)
        return way


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _reads(func: Any) -> bool:
    """Whether an operator reads elements, unlike a view or a question about a shape."""
    schema = schema_of(func)
    if schema is None:
        return True
    views = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    namespace, name = schema.name.split("::")
    return not views and namespace != "prim" and not name.startswith(METADATA)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes; all of those of a Triton kernel."""
    schema = schema_of(func)
    if schema is None:
        return _tensors((args, kwargs)) if "mutation" in getattr(func, "__name__", "") else []
    named = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    given = [*zip(named, args, strict=False), *kwargs.items()]
    return _tensors([value for name, value in given if named.get(name)])
