"""The kernels of a rank's lowered graph and their times: products by local shapes, fused groups by the bytes that they move."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from bench.quality.prices import KERNEL, Device, arithmetic_time, attention_time, product_time

VIEWS = {"view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "alias"}
VIEWS |= {"detach", "split", "split_with_sizes", "wait_tensor", "axis_index"}
BLOCKS = {"block_attention", "block_attention_backward"}
PRODUCTS = BLOCKS | {"einsum", "sdpa", "sdpa_backward", "convolution", "convolution_backward", "expert_linear", "expert_outer"}
FUSES = {
    "_to_copy",
    "convert_element_type",
    "cat",
    "stack",
    "constant_pad_nd",
    "index_select",
    "clone",
    "slice_backward",
    "select_backward",
}
LOOKUPS = {"embedding", "index_select", "gather", "index"}
"""They read the rows that they return, not the whole operand."""
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "shift": "shift",
    "zigzag": "shift",
}
EXPERTS, IMBALANCE = 32, 1.25
"""Experts of ``bench.quality.models.moe``; rows of the busiest rank's experts over the mean, where they are sharded (docs/experts.md)."""


def kind_of(node: fx.Node) -> str:
    """The operator's name without library and overload: ``einsum``; empty for what is no call."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ""
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    value = node.meta.get("val")
    found = value if isinstance(value, tuple | list) else (value,)
    return tuple(one for one in found if isinstance(one, torch.Tensor))


def size(node: fx.Node) -> int:
    """Bytes of a node's results."""
    return sum(one.numel() * one.element_size() for one in tensors(node))


def is_packing(node: fx.Node) -> bool:
    """Whether it copies a value for a collective, or puts it together after one: along dims other than the first, and in all-to-alls."""
    kind, read = kind_of(node), node.all_input_nodes
    if kind == "clone":
        return kind_of(base(read[0])) in COLLECTIVES or any(kind_of(one) in COLLECTIVES for one in _readers(node))
    return (
        kind in ("cat", "stack") and len({base(one) for one in read}) == 1 and all(kind_of(one) in ("slice", "select", "") for one in read)
    )


def copies(graph: fx.Graph, on: Device) -> float:
    """Microseconds of all packing, if each copy is a kernel of its own, which Inductor may fuse with a neighbour."""
    return sum(KERNEL + 2 * size(node) / on.memory for node in graph.nodes if is_packing(node))


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target is operator.getitem or kind_of(node) in VIEWS or is_packing(node))


def base(node: fx.Node) -> fx.Node:
    """The value of which ``node`` is a view."""
    while node.op == "call_function" and (node.target is operator.getitem or kind_of(node) in VIEWS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def fuses(node: fx.Node) -> bool:
    """Whether Inductor joins it with its neighbours: pointwise operators, reductions, and the parts of norms and softmax."""
    kind = kind_of(node)
    if not kind or is_view(node) or kind in PRODUCTS or kind in COLLECTIVES:
        return False
    tags = getattr(node.target, "tags", ())
    return str(node.target).startswith("fxshard") or kind in FUSES or torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def times(graph: fx.Graph, on: Device) -> dict[fx.Node, float]:
    """Microseconds of each kernel, at the node that runs first of it."""
    found = {node: time for node in graph.nodes if (time := _alone(node, on))}
    for group in _groups(graph):
        read, written = _traffic(group)
        if written:
            found[group[0]] = KERNEL + (read + written) / on.memory
    return found


def _alone(node: fx.Node, on: Device) -> float:
    """Of an operator with a kernel of its own; 0 for others."""
    if node.op != "call_function" or is_view(node) or fuses(node) or kind_of(node) in COLLECTIVES or not tensors(node):
        return 0.0
    kind, read = kind_of(node), sum(size(one) for one in node.all_input_nodes)
    if kind in LOOKUPS:
        read = size(node)
    arithmetic = ARITHMETIC[kind](node, on) if kind in ARITHMETIC else 0.0
    return KERNEL + max(arithmetic, (read + size(node)) / on.memory)


def _shapes(node: fx.Node, *places: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(node.args[place].meta["val"].shape) for place in places)  # type: ignore[union-attr]  # products read nodes


def _item(node: fx.Node) -> int:
    return tensors(node)[0].element_size()


def _einsum(node: fx.Node, on: Device) -> float:
    first, second = _shapes(node, 0, 1)
    operands, result = str(node.args[2]).split("->")
    one, two = operands.split(",")
    extent = {**dict(zip(two, second, strict=True)), **dict(zip(one, first, strict=True))}
    batch, m, n, k = (
        math.prod(extent[c] for c in extent if (c in one, c in two, c in result) == held)
        for held in ((True, True, True), (True, False, True), (False, True, True), (True, True, False))
    )
    return product_time(on, _item(node), batch, m, n, k)


def _attention(node: fx.Node, on: Device) -> float:
    """Two products forward, five backward; of causal scores, those that the last rank sees."""
    backward = kind_of(node).endswith("_backward")
    q, k = _shapes(node, int(backward), 1 + int(backward))
    scores = float(q[-2] * k[-2])
    if kind_of(node) in BLOCKS:  # keys dealt head to tail, half of which are seen, or those of the last queries
        scores = scores / 2 if node.args[7 if backward else 4] is not None else scores - (q[-2] ** 2 / 2 if k[-2] > q[-2] else 0)
    elif node.args[7 if backward else 4] is True:
        scores /= 2
    return attention_time(on, _item(node), (5 if backward else 2) * 2 * math.prod(q[:-2]) * q[-1] * scores, k[-2], backward)


def _convolution(node: fx.Node, on: Device) -> float:
    out, weight = tuple(tensors(node)[0].shape), _shapes(node, 1)[0]
    return arithmetic_time(on, _item(node), 2 * math.prod(out) * math.prod(weight[1:]))


def _convolution_backward(node: fx.Node, on: Device) -> float:
    grad, weight = _shapes(node, 0, 2)
    return arithmetic_time(on, _item(node), 4 * math.prod(grad) * math.prod(weight[1:]))


def _experts(node: fx.Node, on: Device) -> float:
    """Each row times the matrix of one expert; a rank with some of the experts computes their share of the rows."""
    rows, other = _shapes(node, 0, 1)
    held = other[0] if kind_of(node) == "expert_linear" else tensors(node)[0].shape[0]
    share = held / EXPERTS * (IMBALANCE if held < EXPERTS else 1.0)
    return arithmetic_time(on, _item(node), 2 * math.prod(rows[:2]) * rows[-1] * other[-1] * share)


ARITHMETIC: dict[str, Callable[[fx.Node, Device], float]] = {
    "einsum": _einsum,
    "sdpa": _attention,
    "sdpa_backward": _attention,
    "block_attention": _attention,
    "block_attention_backward": _attention,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "expert_linear": _experts,
    "expert_outer": _experts,
}


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Fused operators with equally many borders before them that read each other's results or the same value."""
    depth: dict[fx.Node, int] = {}
    group: dict[fx.Node, list[fx.Node]] = {}
    first: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in graph.nodes:
        depth[node] = max((depth[one] + _is_border(one) for one in node.all_input_nodes), default=0)
        if not fuses(node):
            continue
        group[node] = [node]
        for value in map(base, node.all_input_nodes):
            near = value if fuses(value) and depth[value] == depth[node] else first.setdefault((value, depth[node]), node)
            _join(group, group[near], group[node])
    order = {node: k for k, node in enumerate(graph.nodes)}
    return [sorted(one, key=order.__getitem__) for one in {id(one): one for one in group.values()}.values()]


def _join(group: dict[fx.Node, list[fx.Node]], one: list[fx.Node], two: list[fx.Node]) -> None:
    if one is not two:
        one.extend(two)
        group.update(dict.fromkeys(two, one))


def _is_border(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.all_input_nodes) and not is_view(node) and not fuses(node)


def _traffic(group: list[fx.Node]) -> tuple[int, int]:
    """Bytes that one kernel reads and writes: each value from outside once, each value that others read."""
    members, read = set(group), dict[fx.Node, int]()
    for node in group:
        for value in node.all_input_nodes:
            made = base(value)
            if made not in members:
                source = _origin(made) if size(value) == size(made) else made
                part = size(node) if kind_of(node) in LOOKUPS else min(size(value), size(source))
                read[source] = max(read.get(source, 0), part)
    return sum(read.values()), sum(size(node) for node in group if _is_written(node, members))


def _is_written(node: fx.Node, members: set[fx.Node]) -> bool:
    outside = [one for one in _readers(node) if one not in members]
    return any(not fuses(one) for one in outside) or (bool(outside) and _origin(node) is node)


def _origin(node: fx.Node) -> fx.Node:
    """What a later kernel reads to compute a fused value again: one value in memory of as many elements, in no more bytes; else itself."""
    if not fuses(node):
        return node
    if "origin" not in node.meta:
        wide = {_origin(base(one)) for one in node.all_input_nodes if _numel(base(one)) == _numel(node)}
        only = wide.pop() if len(wide) == 1 else node
        node.meta["origin"] = only if size(only) <= size(node) else node
    found: fx.Node = node.meta["origin"]
    return found


def _numel(node: fx.Node) -> int:
    return sum(one.numel() for one in tensors(node))


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    for one in node.users:
        if one.target is operator.getitem or kind_of(one) in VIEWS:
            yield from _readers(one)
        else:
            yield one
