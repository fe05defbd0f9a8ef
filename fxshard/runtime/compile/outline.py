"""outline: runs of equal nodes in a rank's graph become calls of one subgraph each, which Inductor compiles once. Decision 0038.

A graph of many alike layers repeats itself, node by node: operators, constants, shapes, strides and dtypes. ``outline`` finds where, cuts
the repeats into pieces, and writes pieces that are equal in all (also in what they read of one another, and in what later nodes read of
them) as calls of the operator ``invoke_subgraph``. What a piece returns shares no memory: views are made again outside.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, groupby
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.inductor.inductor import INVOKE_SUBGRAPH, takes_subgraphs
from fxshard._torch_compat.symbols import plain
from fxshard.graph.planning_graph import is_getitem, is_number
from fxshard.runtime.compile.cuts import Cuts, is_view, leaves, stays
from fxshard.runtime.compile.repeats import coded, find_runs
from fxshard.runtime.compile.size_nodes import (
    numbers_of,
    only_of_numbers,
    symbols_given,
    symbols_in,
    values_read,
    with_sources,
)

LEAST = 4
"""Repeats: fewer are left as they are."""
SAVES = 32
"""Nodes that need not be compiled: for fewer a call is not worth it."""
ALIGNED = 16
"""Bytes."""
log = logging.getLogger("fxshard")


@dataclass(frozen=True, eq=False)
class Piece:
    """Nodes of a graph, none of which reads what stands between them."""

    nodes: tuple[fx.Node, ...]

    @cached_property
    def inside(self) -> frozenset[fx.Node]:
        return frozenset(self.nodes)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the nodes read that is not of the piece, each once, as it is first read; other nodes once calls are written.

        Numbers are computed inside, from ``symbols``."""
        read = (x for node in self.nodes for x in values_read(node) if x not in self.inside)
        return tuple(dict.fromkeys(read))

    @cached_property
    def numbers(self) -> list[fx.Node]:
        """Numbers that the nodes read, and what they are computed from in the graph."""
        return with_sources(x for node in self.nodes for x in node.all_input_nodes if is_number(x))

    @cached_property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """What sizes and numbers inside are made of."""
        read = (x for node in self.nodes for x in node.all_input_nodes)
        return frozenset(symbols_in(n.meta.get("val") for n in (*self.nodes, *read)))

    @cached_property
    def exports(self) -> tuple[fx.Node, ...]:
        """What others read of the piece, in its order; of a view that which it is a view of."""
        read = (self.base(n) for n in self.nodes if self.is_read(n))
        found = {n for n in read if n in self.inside}
        return tuple(n for n in self.nodes if n in found)

    def fits(self, given: Collection[sympy.Symbol]) -> bool:
        """Whether all that it is given and returns are tensors that strides describe, and symbols that are inputs of the graph."""
        ends = [n.meta.get("val") for n in (*self.inputs, *self.exports)]
        dense = all(isinstance(v, torch.Tensor) and v.layout == torch.strided for v in ends)
        return bool(self.exports) and dense and self.symbols <= set(given)

    def is_read(self, node: fx.Node) -> bool:
        """Whether somebody outside reads ``node``."""
        return any(user not in self.inside for user in node.users)

    def base(self, node: fx.Node) -> fx.Node:
        while node in self.inside and is_view(node):
            node = values_read(node)[0]
        return node

    @cached_property
    def said(self) -> Hashable:
        """Equal for pieces that one subgraph can stand for."""
        names: dict[fx.Node, Hashable] = {n: ("input", i) for i, n in enumerate(self.inputs)}
        names.update((n, i) for i, n in enumerate(self.nodes))
        calls = tuple((call_said(n), tuple(names[x] for x in _read(n))) for n in self.nodes)
        return calls, tuple(names[n] for n in self.exports), tuple(_given_numbers(self))


def outline(module: fx.GraphModule) -> tuple[int, ...]:
    """Replaces repeated nodes of ``module`` by calls, in place; how many calls each subgraph has. What it did is logged.

    A graph that reads a size from a tensor is left as it is, and so are all where Inductor writes its wrapper in C++.
    """
    graph = module.graph
    if not takes_subgraphs():
        log.info("Inductor's wrapper in C++ has no calls of subgraphs: layers that are alike are compiled one by one")
        return ()
    if not only_of_numbers(graph):
        log.info("a size is read from a tensor: layers that are alike are compiled one by one")
        return ()
    order = with_views_raised(graph)
    chosen = _groups(_calls(graph, order))
    if not chosen:
        return ()
    for node in order:
        graph.output_node().prepend(node)
    for number, group in enumerate(chosen):
        _write(module, f"repeated_{number}", group)
        log.info("%d repeats of %d calls are compiled once", len(group), len(group[0].nodes))
    graph.lint()
    module.recompile()
    return tuple(map(len, chosen))


def _groups(nodes: Sequence[fx.Node]) -> list[list[Piece]]:
    """Pieces that are equal to one another, as many as are worth it."""
    if not nodes:
        return []
    given = symbols_given(nodes[0].graph)
    codes, found = _codes(nodes), defaultdict[Hashable, list[Piece]](list)
    cuts = Cuts(nodes, codes)
    for run in find_runs(codes, LEAST, SAVES):
        for start in cuts.of(run):
            for piece in _pieces(nodes[start : start + run.period], given):
                found[piece.said].append(piece)
    return [group for group in found.values() if len(group) >= LEAST and (len(group) - 1) * len(group[0].nodes) >= SAVES]


def _calls(graph: fx.Graph, order: Iterable[fx.Node]) -> list[fx.Node]:
    """The calls of a graph, in ``order``, from the first that computes something, but for its leaves."""
    last = leaves(graph)
    calls = (n for n in order if n.op not in ("placeholder", "get_attr") and n not in last and not is_number(n))
    return list(dropwhile(is_view, calls))


def _codes(nodes: Sequence[fx.Node]) -> np.ndarray:
    return coded(map(call_said, nodes))


def call_said(node: fx.Node) -> Hashable:
    """The call with its constants, and what its arguments and its result look like; not where the arguments come from."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    parts = tuple(_form(x.meta.get("val")) if isinstance(x, fx.Node) else (type(x), repr(x)) for x in flat)
    return node.target, str(spec), parts, _form(node.meta.get("val"))


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments but for numbers, each as often as it stands there."""
    return [x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, fx.Node) and not is_number(x)]


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        numbers = tuple(map(plain, numbers_of(value)))
        if value.layout != torch.strided:
            return numbers, value.dtype, str(value.device), str(value.layout)
        offset = numbers[-1]  # kernels for GPUs read several elements at once where they may
        aligned = offset * value.element_size() % ALIGNED if isinstance(offset, int) else offset
        return numbers[:-1], value.dtype, str(value.device), aligned
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), str(plain(value)))


def with_views_raised(graph: fx.Graph) -> list[fx.Node]:
    """All nodes but the output, each view and each entry of a list right behind what it is of: it may be of a value before the repeats.

    Numbers come first: a view is made of them."""
    below: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_getitem(node) or is_view(node):
            below[node.all_input_nodes[0]].append(node)
    views = {view for found in below.values() for view in found}
    first = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    given = set(first)
    first += [n for n in graph.nodes if n not in given and is_number(n)]
    known = {*first, *views}
    calls = [n for n in graph.nodes if n not in known and n.op != "output"]
    of_first = [view for n in first for view in _below(n, below)]
    return [*first, *of_first, *(m for n in calls for m in (n, *_below(n, below)))]


def _below(node: fx.Node, below: Mapping[fx.Node, list[fx.Node]]) -> Iterator[fx.Node]:
    for view in below.get(node, ()):
        yield view
        yield from _below(view, below)


def _pieces(segment: Iterable[fx.Node], given: Collection[sympy.Symbol]) -> Iterator[Piece]:
    """The nodes of one repeat, without those that stay where they are."""
    for staying, nodes in groupby(segment, stays):
        if not staying:
            yield from (piece for piece in _apart(tuple(nodes)) if piece.fits(given))


def _apart(nodes: Sequence[fx.Node]) -> Iterator[Piece]:
    """Without joins of what others read too: Inductor computes a part where it lies in the whole."""
    piece = Piece(tuple(nodes))
    exports = set(piece.exports)
    for i, node in enumerate(nodes):
        if node.target is torch.ops.aten.cat.default and any(piece.base(x) in exports for x in node.all_input_nodes):
            yield from _apart(nodes[:i])
            yield from _apart(nodes[i + 1 :])
            return
    if nodes:
        yield piece


def _write(module: fx.GraphModule, name: str, group: Sequence[Piece]) -> None:
    """Has calls of the subgraph ``name`` in place of the pieces of ``group``."""
    graph = module.graph
    module.add_module(name, _subgraph(group[0]))
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        subgraph = graph.get_attr(name)
    for piece in group:
        with graph.inserting_before(piece.nodes[0]):
            outside = _called(graph, name, subgraph, piece)
        for node, new in outside.items():
            node.replace_all_uses_with(new, delete_user_cb=lambda user, piece=piece: user not in piece.inside)
        for node in reversed(piece.nodes):
            graph.erase_node(node)


def _given_numbers(piece: Piece) -> list[fx.Node]:
    """The graph's inputs that a call of ``piece`` is given for its numbers: each of its symbols among them."""
    given = symbols_given(piece.nodes[0].graph)
    symbols = [node for symbol, node in given.items() if symbol in piece.symbols]
    return list(dict.fromkeys([*symbols, *(n for n in piece.numbers if n.op == "placeholder")]))


def _called(graph: fx.Graph, name: str, subgraph: fx.Node, piece: Piece) -> dict[fx.Node, fx.Node]:
    """A call in place of ``piece``: what stands for each of its nodes that others read."""
    call = graph.call_function(INVOKE_SUBGRAPH, (subgraph, name, *_given_numbers(piece), *piece.inputs))
    call.meta["val"] = tuple(n.meta["val"] for n in piece.exports)
    outside: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(piece.exports):
        outside[node] = graph.call_function(operator.getitem, (call, i))
        outside[node].meta = dict(node.meta)
    for node in filter(piece.is_read, piece.nodes):
        _viewed(graph, node, piece, outside)
    return outside


def _viewed(graph: fx.Graph, node: fx.Node, piece: Piece, outside: dict[fx.Node, fx.Node]) -> fx.Node:
    """What stands for ``node`` outside of ``piece``: a view is made again."""
    if node not in piece.inside or node in outside:
        return outside.get(node, node)
    source = values_read(node)[0]
    made = _viewed(graph, source, piece, outside)
    outside[node] = graph.node_copy(node, lambda n: made if n is source else n)
    return outside[node]


def _subgraph(piece: Piece) -> fx.GraphModule:
    """The piece as a graph of its own, whose values share memory as the calls have it and not with what it is given."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _given_numbers(piece):
        new[node] = graph.placeholder(node.name)
        new[node].meta["val"] = node.meta["val"]
    value = next(v for n in piece.nodes for v in pytree.tree_leaves(n.meta["val"]))
    with value.fake_mode, torch.no_grad():
        for i, node in enumerate(piece.inputs):
            value = node.meta["val"]
            new[node] = graph.placeholder(f"input_{i}")
            new[node].meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for node in (n for n in piece.numbers if n.op != "placeholder"):
            new[node] = graph.node_copy(node, new.__getitem__)
        for node in piece.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            args, kwargs = fx.map_arg((new[node].args, dict(new[node].kwargs)), lambda n: n.meta["val"])
            new[node].meta["val"] = node.target(*args, **kwargs)
    output = graph.output(tuple(new[n] for n in piece.exports))
    output.meta["user_visible_output_idxs"] = list(range(len(piece.exports)))
    return fx.GraphModule(torch.nn.Module(), graph)
