"""``fxshard inspect PROGRAM.pt2 --model-explorer OUT.json``: what Model Explorer shows on the nodes of the program's graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.errors import OptionError
from fxshard.files import atomic_file, write_json

if TYPE_CHECKING:
    from fxshard.program.sharded_program import ShardedProgram


def model_explorer_data(program: ShardedProgram) -> dict[str, dict[str, Any]]:
    """Node data by kind: ``time`` (predicted microseconds of operators and collectives), ``layout`` (of what a node gives), ``memory``
    (bytes that a device holds while the node runs).

    Times of a program with dynamic sizes are those at the example's. The graph is that of the first size class, which
    ``torch.export.load`` returns. Layouts are known where values enter and leave the program, and before and after each collective that
    serves one of the plan's; other nodes have none.
    """
    from fxshard.passes.after_lowering.schedule import predicted
    from fxshard.runtime.rank_graph.memory import local_graph_memory
    from fxshard.views.model_explorer import numbers, texts

    names = [node.name for node in program.first.graph.nodes]
    times = {event.name: event.end - event.start for event in predicted(program).events}
    profile = local_graph_memory(program)
    held: dict[str, int] = {}
    for step, size in zip(profile.steps, profile.over_time, strict=True):
        held[step.name] = max(size, held.get(step.name, 0))
    return {
        "time": numbers(f"predicted time (us){_at_example(program)}", _of(names, times)),
        "layout": texts("layout", _of(names, _layouts(program))),
        "memory": numbers("memory held (bytes)", _of(names, held)),
    }


def _at_example(program: ShardedProgram) -> str:
    """`` at rows=8``: the sizes to which predicted times refer; empty without dynamic sizes."""
    from fxshard.shapes import sizes_named

    return f" at {sizes_named([(one.name, one.example) for one in program.sizes])}" if program.sizes else ""


def _of(names: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _layouts(program: ShardedProgram) -> dict[str, str]:
    from fxshard.plans.plan_text import view_of

    graph, found = program.first.graph, dict[str, str]()
    planned = {(c.entry, c.step): c for c in view_of(program.plan).collectives}
    nodes = {node.name: node for node in graph.nodes}
    for issued in program.collectives:
        served = [planned[pair] for pair in issued.serves if pair in planned]
        if len(served) == 1 and issued.node in nodes:
            started = nodes[issued.node]
            found[started.all_input_nodes[0].name] = served[0].source
            found |= dict.fromkeys((started.name, *(wait.name for wait in started.users)), served[0].target)
    (returned,) = graph.find_nodes(op="output")
    results = [node for node in returned.args[0] if node is not None]
    ends = list(zip(results, program.output_layouts, strict=False))
    ends += zip(graph.find_nodes(op="placeholder"), program.input_layouts, strict=False)
    return found | {node.name: str(layout) for node, layout in ends}


def write_model_explorer(data: Mapping[str, Any], path: str) -> list[str]:
    """Writes ``OUT.time.json`` and so on for ``OUT.json``; returns their names."""
    written = []
    for kind, one in data.items():
        target = str(Path(path).with_suffix(f".{kind}.json"))
        with atomic_file(target) as temporary:
            temporary.write_text(write_json(one), encoding="utf-8")
        written.append(target)
    return written


def check_model_explorer(path: str, *, is_program: bool) -> None:
    """Raises OptionError for a plan's file, which holds no graph that Model Explorer opens, and for another kind of output."""
    if not is_program:
        remedy = "give a program that fxshard export -o wrote; Model Explorer opens it beside these data"
        raise OptionError("a plan's file holds no graph that Model Explorer shows", where="--model-explorer", remedy=remedy)
    if not path.endswith(".json"):
        raise OptionError(f"cannot write {path!r}", where="--model-explorer", remedy="end its name in .json")
