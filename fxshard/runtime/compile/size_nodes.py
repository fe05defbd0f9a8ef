"""size_nodes: helpers for graphs with symbolic sizes: number nodes, input symbols, and the sizes and strides of tensors.

Nothing here compares symbols, because a comparison would add a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.sizes.symbols import expression, hint_of, is_symbolic, is_unknown, plain
from fxshard.graph.planning_graph import is_number


def value_operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a call other than numbers, each once."""
    return [n for n in node.all_input_nodes if not is_number(n)]


def geometry(value: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and offset of a tensor; only the sizes of a sparse one."""
    return (*value.shape, *value.stride(), value.storage_offset()) if value.layout == torch.strided else tuple(value.shape)


def numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    """Sizes, strides and offsets of the tensors in ``values``, and all leaves that are not tensors."""
    for leaf in pytree.tree_leaves(list(values)):
        yield from geometry(leaf) if isinstance(leaf, torch.Tensor) else (leaf,)


def symbols_in(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols in ``values``: in numbers, and in sizes, strides and offsets of tensors."""
    return {symbol for n in numbers_in(values) if is_symbolic(n) for symbol in expression(n).free_symbols}


def input_symbols(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The inputs of a graph whose value is a single symbol, by symbol."""
    inputs = ((plain(node.meta["val"]), node) for node in graph.find_nodes(op="placeholder") if is_number(node))
    return {symbol: node for symbol, node in inputs if isinstance(symbol, sympy.Symbol)}


def numbers_are_data_independent(graph: fx.Graph) -> bool:
    """Whether all numbers are computed from numbers only, so that no size depends on data in a tensor."""
    calls = [node for node in graph.nodes if node.op != "placeholder" and is_number(node)]
    return not any(map(value_operands, calls)) and not any(map(is_unknown, numbers_in(node.meta.get("val") for node in graph.nodes)))


def with_operands(numbers: Iterable[fx.Node]) -> list[fx.Node]:
    """These numbers and all inputs and calls from which they are computed, in topological order."""
    made: dict[fx.Node, None] = {}

    def make(node: fx.Node) -> None:
        if node not in made:
            for source in node.all_input_nodes:
                make(source)
            made[node] = None

    for node in numbers:
        make(node)
    return list(made)


def bytes_at_example(value: torch.Tensor) -> int:
    """Bytes of a tensor at the example's sizes."""
    count = value.numel()
    return int(hint_of(count) if is_symbolic(count) else count) * value.element_size()
