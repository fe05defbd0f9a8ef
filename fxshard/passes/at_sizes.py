"""A program with dynamic sizes at some of them: numbers all over, as if it had been lowered for these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxshard._torch_compat.symbols import evaluated
from fxshard.cost.timeline import bytes_sent
from fxshard.errors import SizesError
from fxshard.passes.local_graph import FAKES
from fxshard.program import ShardedProgram, is_collective
from fxshard.shapes import evaluate_all, instantiated, sizes_named


def program_at(program: ShardedProgram, sizes: Mapping[str, int]) -> ShardedProgram:
    """``program`` at ``sizes``, by name; as it is where it has no dynamic ones. Raises SizesError for sizes that it does not serve."""
    if not program.sizes:
        return program
    reason = program.refuses(sizes)
    if reason is not None:
        raise SizesError(reason, remedy="lower, or export, the model for these sizes by themselves")
    values = program.values(sizes)
    try:
        modules = {key: instantiated(m, values, lambda expr, _: evaluated(expr, values), FAKES) for key, m in program.modules.items()}
    except ArithmeticError as error:  # a number that the model computes of sizes, such as 1 / (n - 1)
        what = f"a number that is computed of sizes has no value at {sizes_named(sizes)}: {error}"
        raise SizesError(what, remedy="lower the graph for these sizes by themselves") from error
    first = modules[program.classes[(0,) * program.mesh.ndim]].graph
    collectives = []
    for one, node in zip(program.collectives, filter(is_collective, first.nodes), strict=True):
        sent = bytes_sent(node, program.mesh.shape[program.mesh.axis(one.axis)])
        collectives.append(replace(one, bytes=sent, shape=tuple(node.all_input_nodes[0].meta["val"].shape)))
    return replace(
        program,
        modules=modules,
        input_shapes=tuple(evaluate_all(shape, values) for shape in program.input_shapes),
        output_shapes=tuple(evaluate_all(shape, values) for shape in program.output_shapes),
        collectives=tuple(collectives),
        sizes=(),
        guards=(),
    )
