"""share: removes collectives that repeat an earlier one, and those whose result nobody reads.

A solver's plan has neither; a plan that is written by hand or drawn at random may. In each local graph, collectives and the light operators
around them are compared by their inputs (common-subexpression elimination); one is removed only if it can be on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from torch import fx

from fxshard._torch_compat.nodes import inputs_of
from fxshard.passes.after_lowering.forward_backward import forward_nodes
from fxshard.passes.after_lowering.rewrite import copied
from fxshard.passes.after_lowering.schedule import is_light
from fxshard.program.sharded_program import ShardedProgram, is_collective, is_wait


def share(program: ShardedProgram) -> ShardedProgram:
    """The program without collectives that are unread, or that repeat another one in the same half of the step."""
    found = [_duplicates(program, module.graph) for module in program.modules.values()]
    same = {k: first for k, first in found[0].items() if all(other.get(k) == first for other in found)}
    unread = set.intersection(*(_unread(module.graph) for module in program.modules.values()))
    unread -= {first for k, first in same.items() if k not in unread}  # its readers include those of its duplicates
    if not same and not unread:
        return program
    graphs = {size_class: copied(module) for size_class, module in program.modules.items()}
    for module in graphs.values():
        collectives = [n for n in module.graph.nodes if is_collective(n)]
        for k in sorted({*same, *unread}, reverse=True):
            _drop(module.graph, collectives[k], collectives[same[k]] if k in same else None)
        module.graph.eliminate_dead_code()
    serves = {k: list(c.serves) for k, c in enumerate(program.collectives)}
    for k in sorted(same, reverse=True):
        serves[same[k]] += serves[k]
    kept = [replace(c, serves=tuple(serves[k])) for k, c in enumerate(program.collectives) if k not in same and k not in unread]
    return program.with_modules(graphs, kept)


def _duplicates(program: ShardedProgram, graph: fx.Graph) -> dict[int, int]:
    """Number of a collective -> number of the first one with the same input in the same half."""
    early = forward_nodes(program, graph)
    value: dict[fx.Node, fx.Node] = {}
    first: dict[Hashable, list[fx.Node]] = {}
    numbers: dict[fx.Node, int] = {}
    texts: dict[fx.Node, str] = {}
    found: dict[int, int] = {}
    for node in graph.nodes:
        value[node] = node
        if is_collective(node) or is_wait(node) or is_light(node):
            rivals = first.setdefault((node.target, node in early, *map(value.__getitem__, inputs_of(node))), [])
            for one in (*rivals, node) if rivals else ():
                if one not in texts:
                    texts[one] = _arguments(one, value)
            value[node] = next((n for n in rivals if texts[n] == texts[node]), node)
            if value[node] is node:
                rivals.append(node)
        if is_collective(node):
            numbers[node] = len(numbers)
            if value[node] is not node:
                found[numbers[node]] = numbers[value[node]]
    return found


def _arguments(node: fx.Node, value: Mapping[fx.Node, fx.Node]) -> str:
    """As text, because 1, 1.0 and True are different arguments."""
    return str(fx.map_arg((node.args, dict(node.kwargs)), value.__getitem__))


def _unread(graph: fx.Graph) -> set[int]:
    """Numbers of the collectives whose waits have no users."""
    collectives = [n for n in graph.nodes if is_collective(n)]
    return {k for k, n in enumerate(collectives) if not any(wait.users for wait in n.users)}


def _drop(graph: fx.Graph, node: fx.Node, instead: fx.Node | None) -> None:
    (wait,) = node.users
    if instead is not None:
        wait.replace_all_uses_with(next(iter(instead.users)))
    graph.erase_node(wait)
    graph.erase_node(node)
