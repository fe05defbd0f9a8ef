"""size_nodes: numbers in a graph whose sizes are symbols: which calls make them, which inputs are symbols, and what tensors look like.

Nothing here compares symbols: to ask whether two sizes are equal would be a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.symbols import expression, hint_of, is_symbolic, is_unknown, plain
from fxshard.graph.planning_graph import is_number


def values_read(node: fx.Node) -> list[fx.Node]:
    """What a call reads but for numbers, each once."""
    return [n for n in node.all_input_nodes if not is_number(n)]


def numbers_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and the offset of a tensor; of a sparse one its sizes."""
    return (*value.shape, *value.stride(), value.storage_offset()) if value.layout == torch.strided else tuple(value.shape)


def numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    """Numbers, those of tensors, and whatever else is no tensor."""
    for leaf in pytree.tree_leaves(list(values)):
        yield from numbers_of(leaf) if isinstance(leaf, torch.Tensor) else (leaf,)


def symbols_in(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols that numbers, and the sizes of tensors, are made of."""
    return {symbol for n in numbers_in(values) if is_symbolic(n) for symbol in expression(n).free_symbols}


def symbols_given(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The inputs of a graph that are symbols themselves, by symbol."""
    inputs = ((plain(node.meta["val"]), node) for node in graph.find_nodes(op="placeholder") if is_number(node))
    return {symbol: node for symbol, node in inputs if isinstance(symbol, sympy.Symbol)}


def only_of_numbers(graph: fx.Graph) -> bool:
    """Whether all numbers are computed from numbers: none is read from a tensor, or one that only running tells."""
    calls = [node for node in graph.nodes if node.op != "placeholder" and is_number(node)]
    return not any(map(values_read, calls)) and not any(map(is_unknown, numbers_in(node.meta.get("val") for node in graph.nodes)))


def with_sources(numbers: Iterable[fx.Node]) -> list[fx.Node]:
    """Inputs and calls that these numbers are computed from, and they themselves, in an order in which they can be made."""
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
