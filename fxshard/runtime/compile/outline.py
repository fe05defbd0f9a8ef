"""outline: replaces repeated regions of a rank's graph by calls of a subgraph, which Inductor compiles once. Decision 0038.

A graph of equal layers repeats node by node: operators, constants, shapes, strides and dtypes. ``outline`` finds the repeats, cuts them
into regions, and replaces equal regions by calls of the operator ``invoke_subgraph``. Equal regions also agree in the values that they
read from one another, and in those that later nodes read from them. The results of a region share no memory: views are recreated outside.
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

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.inductor.inductor import INVOKE_SUBGRAPH, takes_subgraphs
from fxshard._torch_compat.sizes.symbols import plain
from fxshard.graph.planning_graph import is_getitem, is_number
from fxshard.runtime.compile.cuts import CutCosts, epilogue_nodes, is_view, stays_outside
from fxshard.runtime.compile.repeats import encode, find_runs
from fxshard.runtime.compile.size_nodes import (
    geometry,
    input_symbols,
    numbers_are_data_independent,
    symbols_in,
    value_operands,
    with_operands,
)

MIN_REPEATS = 4
"""The minimum number of repeats to outline."""
MIN_SAVED_NODES = 32
"""The minimum number of nodes that outlining must save from compilation."""
ALIGNMENT = 16
"""Bytes to which Inductor's kernels for GPUs may assume alignment."""
log = logging.getLogger("fxshard")


@dataclass(frozen=True, eq=False)
class Region:
    """Nodes of a graph that can run together: no node outside of the region has to run between two of them."""

    nodes: tuple[fx.Node, ...]

    @cached_property
    def inside(self) -> frozenset[fx.Node]:
        return frozenset(self.nodes)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The values that the region reads from outside, each once, in the order of their first use.

        Not cached: replacing regions by calls changes them. Numbers are not inputs; the region computes them from ``symbols``.
        """
        read = (x for node in self.nodes for x in value_operands(node) if x not in self.inside)
        return tuple(dict.fromkeys(read))

    @cached_property
    def numbers(self) -> list[fx.Node]:
        """The numbers that the nodes read, and all nodes from which those are computed."""
        return with_operands(x for node in self.nodes for x in node.all_input_nodes if is_number(x))

    @cached_property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """The symbols in the sizes and numbers of the region."""
        read = (x for node in self.nodes for x in node.all_input_nodes)
        return frozenset(symbols_in(n.meta.get("val") for n in (*self.nodes, *read)))

    @cached_property
    def exports(self) -> tuple[fx.Node, ...]:
        """The nodes with users outside, in order; a view is replaced by its base."""
        read = (self.base(n) for n in self.nodes if self.has_outside_users(n))
        found = {n for n in read if n in self.inside}
        return tuple(n for n in self.nodes if n in found)

    def can_be_subgraph(self, given: Collection[sympy.Symbol]) -> bool:
        """Whether all inputs and exports are strided tensors, there is an export, and all symbols are inputs of the graph."""
        ends = [n.meta.get("val") for n in (*self.inputs, *self.exports)]
        dense = all(isinstance(v, torch.Tensor) and v.layout == torch.strided for v in ends)
        return bool(self.exports) and dense and self.symbols <= set(given)

    def has_outside_users(self, node: fx.Node) -> bool:
        """Whether ``node`` has a user outside of the region."""
        return any(user not in self.inside for user in node.users)

    def base(self, node: fx.Node) -> fx.Node:
        """``node``, or if it is a view, the value that it views; stops at the region's border."""
        while node in self.inside and is_view(node):
            node = value_operands(node)[0]
        return node

    @cached_property
    def signature(self) -> Hashable:
        """Equal for regions that can share one subgraph."""
        names: dict[fx.Node, Hashable] = {n: ("input", i) for i, n in enumerate(self.inputs)}
        names.update((n, i) for i, n in enumerate(self.nodes))
        calls = tuple((call_signature(n), tuple(names[x] for x in _value_operands(n))) for n in self.nodes)
        return calls, tuple(names[n] for n in self.exports), tuple(_number_arguments(self))


def outline(module: fx.GraphModule) -> tuple[int, ...]:
    """Replaces repeated regions of ``module`` by calls, in place. Returns the number of calls of each subgraph; logs what it did.

    Leaves a graph unchanged if it reads a size from a tensor, or if Inductor generates its wrapper in C++.
    """
    graph = module.graph
    if not takes_subgraphs():
        log.info("Inductor's C++ wrapper cannot call subgraphs: equal layers are compiled one by one")
        return ()
    if not numbers_are_data_independent(graph):
        log.info("a size is read from a tensor: equal layers are compiled one by one")
        return ()
    order = order_with_early_views(graph)
    chosen = _equal_regions(_calls(graph, order))
    if not chosen:
        return ()
    for node in order:
        graph.output_node().prepend(node)
    for number, group in enumerate(chosen):
        _replace_by_calls(module, f"repeated_{number}", group)
        log.info("%d repeats of %d calls are compiled once", len(group), len(group[0].nodes))
    graph.lint()
    module.recompile()
    return tuple(map(len, chosen))


def _equal_regions(nodes: Sequence[fx.Node]) -> list[list[Region]]:
    """Groups of equal regions that are worth outlining."""
    if not nodes:
        return []
    given = input_symbols(nodes[0].graph)
    codes, found = encode(map(call_signature, nodes)), defaultdict[Hashable, list[Region]](list)
    cuts = CutCosts(nodes, codes)
    for run in find_runs(codes, MIN_REPEATS, MIN_SAVED_NODES):
        for start in cuts.best_starts(run):
            for region in _regions(nodes[start : start + run.period], given):
                found[region.signature].append(region)
    return [group for group in found.values() if len(group) >= MIN_REPEATS and (len(group) - 1) * len(group[0].nodes) >= MIN_SAVED_NODES]


def _calls(graph: fx.Graph, order: Iterable[fx.Node]) -> list[fx.Node]:
    """The calls of a graph in ``order``, without leading views and without ``epilogue_nodes``."""
    last = epilogue_nodes(graph)
    calls = (n for n in order if n.op not in ("placeholder", "get_attr") and n not in last and not is_number(n))
    return list(dropwhile(is_view, calls))


def call_signature(node: fx.Node) -> Hashable:
    """The target and constants of a call, and the metadata of its operands and result; not which nodes the operands are."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    parts = tuple(_value_signature(x.meta.get("val")) if isinstance(x, fx.Node) else (type(x), repr(x)) for x in flat)
    return node.target, str(spec), parts, _value_signature(node.meta.get("val"))


def _value_operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a call other than numbers, with repetitions."""
    return [x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, fx.Node) and not is_number(x)]


def _value_signature(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        numbers = tuple(map(plain, geometry(value)))
        if value.layout != torch.strided:
            return numbers, value.dtype, str(value.device), str(value.layout)
        offset = numbers[-1]  # kernels for GPUs use vector loads if the alignment allows them
        aligned = offset * value.element_size() % ALIGNMENT if isinstance(offset, int) else offset
        return numbers[:-1], value.dtype, str(value.device), aligned
    return tuple(map(_value_signature, value)) if isinstance(value, (list, tuple)) else (type(value), str(plain(value)))


def order_with_early_views(graph: fx.Graph) -> list[fx.Node]:
    """All nodes but the output, with each view and each list entry right after its base, which may be computed before the repeats.

    Numbers come first, because views read them.
    """
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


def _regions(segment: Iterable[fx.Node], given: Collection[sympy.Symbol]) -> Iterator[Region]:
    """The regions of one repeat, without the nodes that ``stays_outside``."""
    for staying, nodes in groupby(segment, stays_outside):
        if not staying:
            yield from (region for region in _split_at_joins(tuple(nodes)) if region.can_be_subgraph(given))


def _split_at_joins(nodes: Sequence[fx.Node]) -> Iterator[Region]:
    """Splits at each concatenation of exported values: Inductor computes its operands in place, inside the result."""
    region = Region(tuple(nodes))
    exports = set(region.exports)
    for i, node in enumerate(nodes):
        if node.target is torch.ops.aten.cat.default and any(region.base(x) in exports for x in node.all_input_nodes):
            yield from _split_at_joins(nodes[:i])
            yield from _split_at_joins(nodes[i + 1 :])
            return
    if nodes:
        yield region


def _replace_by_calls(module: fx.GraphModule, name: str, group: Sequence[Region]) -> None:
    """Replaces the equal regions of ``group`` by calls of one subgraph ``name``."""
    graph = module.graph
    module.add_module(name, _subgraph(group[0]))
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        subgraph = graph.get_attr(name)
    for region in group:
        with graph.inserting_before(region.nodes[0]):
            outside = _insert_call(graph, name, subgraph, region)
        for node, new in outside.items():
            node.replace_all_uses_with(new, delete_user_cb=lambda user, region=region: user not in region.inside)
        for node in reversed(region.nodes):
            graph.erase_node(node)


def _number_arguments(region: Region) -> list[fx.Node]:
    """The graph's number inputs that a call of ``region`` takes: its symbols, and other inputs that its numbers read."""
    given = input_symbols(region.nodes[0].graph)
    symbols = [node for symbol, node in given.items() if symbol in region.symbols]
    return list(dict.fromkeys([*symbols, *(n for n in region.numbers if n.op == "placeholder")]))


def _insert_call(graph: fx.Graph, name: str, subgraph: fx.Node, region: Region) -> dict[fx.Node, fx.Node]:
    """Inserts a call in place of ``region``; returns the new node for each of its nodes with outside users."""
    call = graph.call_function(INVOKE_SUBGRAPH, (subgraph, name, *_number_arguments(region), *region.inputs))
    call.meta["val"] = tuple(n.meta["val"] for n in region.exports)
    outside: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(region.exports):
        outside[node] = graph.call_function(operator.getitem, (call, i))
        outside[node].meta = dict(node.meta)
    for node in filter(region.has_outside_users, region.nodes):
        _rebuild_view(graph, node, region, outside)
    return outside


def _rebuild_view(graph: fx.Graph, node: fx.Node, region: Region, outside: dict[fx.Node, fx.Node]) -> fx.Node:
    """The new node for ``node`` outside of ``region``; recreates it if it is a view."""
    if node not in region.inside or node in outside:
        return outside.get(node, node)
    source = value_operands(node)[0]
    made = _rebuild_view(graph, source, region, outside)
    outside[node] = graph.node_copy(node, lambda n: made if n is source else n)
    return outside[node]


def _subgraph(region: Region) -> fx.GraphModule:
    """The region as a graph of its own, with new fake values: they alias one another as in the region, but not values outside."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _number_arguments(region):
        new[node] = graph.placeholder(node.name)
        new[node].meta["val"] = node.meta["val"]
    value = next(v for n in region.nodes for v in pytree.tree_leaves(n.meta["val"]))
    with value.fake_mode, torch.no_grad():
        for i, node in enumerate(region.inputs):
            value = node.meta["val"]
            new[node] = graph.placeholder(f"input_{i}")
            new[node].meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for node in (n for n in region.numbers if n.op != "placeholder"):
            new[node] = graph.node_copy(node, new.__getitem__)
        for node in region.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            args, kwargs = fx.map_arg((new[node].args, dict(new[node].kwargs)), lambda n: n.meta["val"])
            new[node].meta["val"] = node.target(*args, **kwargs)
    output = graph.output(tuple(new[n] for n in region.exports))
    output.meta["user_visible_output_idxs"] = list(range(len(region.exports)))
    return fx.GraphModule(torch.nn.Module(), graph)
