"""The values that each submodule returns: recorded while the model is captured, and read from the traced graph.

During the capture, every call of a submodule is followed by a node ``fxshard.returned`` of the tensors that it returned. Tracing rewrites
these nodes like any others, so that they follow the values; ``values_of_modules`` removes them. In a graph that ``torch.compile``
captured, ``note_calls`` adds them from the module stack of each node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import fx, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.dynamo.modules import returned_by_modules
from fxshard.graph.planning_graph import Calls, is_tensor

RETURNED = torch.ops.fxshard.returned.default


def recording_returns(model: nn.Module) -> AbstractContextManager[None]:
    """While Dynamo captures ``model``: records in the graph what its submodules return."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if name:
            names.setdefault(id(module), name)
    return returned_by_modules(RETURNED, names)


def other_names(model: nn.Module) -> dict[str, str]:
    """Further names of modules that occur more than once in a model -> the first name."""
    first: dict[int, str] = {}
    return {name: first[id(m)] for name, m in model.named_modules(remove_duplicate=False) if first.setdefault(id(m), name) != name}


def note_calls(graph: fx.Graph) -> None:
    """Adds ``returned`` nodes to a graph captured without ``recording_returns``, for values that a module computes and others read."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    calls: dict[tuple[str, ...], tuple[str, list[fx.Node]]] = {}
    inside: dict[fx.Node, set[tuple[str, ...]]] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {} if node.op in ("call_function", "call_method") else {}
        keys = tuple(f"{key} {path}" for key, (path, _) in stack.items())
        inside[node] = {keys[: k + 1] for k in range(len(keys))}
        for k, (path, _) in enumerate(stack.values()):
            calls.setdefault(keys[: k + 1], (user_path(path), []))[1].append(node)
    for call, (name, nodes) in calls.items():
        read = [n for n in nodes if any(call not in inside[user] for user in n.users)]
        values = [v for n in read for v in ([n] if _is_tensor(n) else [u for u in n.users if _is_tensor(u)])]
        if name and values:
            with graph.inserting_after(max((*nodes, *values), key=order.__getitem__)):
                graph.call_function(RETURNED, (list(dict.fromkeys(values)), name))


def user_path(path: str) -> str:
    """``L['self'].layers.0`` -> ``layers.0``."""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def drop_unused_returns(joint: fx.GraphModule) -> None:
    """Removes from ``returned`` nodes the values that nothing else reads, so that dead code elimination can remove them."""
    live: set[fx.Node] = set()
    notes = []
    for node in reversed(joint.graph.nodes):
        if node.target is RETURNED:
            notes.append(node)
        elif node in live or node.is_impure():
            live.update((node, *node.all_input_nodes))
    for note in notes:
        note.args = ([n if n in live else None for n in note.args[0]], note.args[1])


def values_of_modules(joint: fx.GraphModule) -> dict[str, Calls]:
    """The values that each module returned, by name; removes the ``returned`` nodes from the graph."""
    found: dict[str, list[tuple[fx.Node | None, ...]]] = {}
    for note in joint.graph.find_nodes(op="call_function", target=RETURNED):
        values, module = note.args
        found.setdefault(module, []).append(tuple(n if n is not None and is_tensor(n) else None for n in values))
        joint.graph.erase_node(note)
    return {name: tuple(tuple(n and n.name for n in call) for call in calls) for name, calls in found.items()}


def with_other_names(modules: Mapping[str, Calls], others: Mapping[str, str]) -> dict[str, Calls]:
    """``modules`` with entries added for the further names ``others``."""
    return {**modules, **{name: modules[first] for name, first in others.items() if first in modules}}
