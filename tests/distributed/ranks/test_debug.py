"""Debug mode on two ranks: if one rank's program was changed, an error names the rank and the collective before it is issued.

Also ``watching``: errors of its own block pass through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import fxshard
from fxshard.errors import RunError
from fxshard.program.sharded_program import KINDS
from fxshard.runtime.compile import compile as compiling
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.ranks.debug import CollectiveChecks
from fxshard.runtime.ranks.watchdog import watching
from tests.distributed.faults import Net
from tests.distributed.ranks.test_agreement import mesh
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
X = torch.ones(64, 8, dtype=torch.float64)


@contextmanager
def tampered(change: Callable[[fx.Graph, list[fx.Node]], None]) -> Iterator[None]:
    """Rank 1 changes its forward with ``change`` after the ranks have compared programs."""
    before = compiling._boxed

    def boxed(module: fx.GraphModule) -> fx.GraphModule:
        collectives = [n for n in module.graph.nodes if n.target in KINDS]
        if dist.get_rank() == 1 and len(collectives) > 1:
            change(module.graph, collectives)
        return before(module)

    compiling._boxed = boxed
    compiling._ARTEFACTS.clear()
    try:
        yield
    finally:
        compiling._boxed = before
        compiling._ARTEFACTS.clear()


def sharded(**options: Any) -> Any:
    """A model whose forward has several all-gathers."""
    pins = {"a.weight": "S(0)", "b.weight": "S(1)", "a": "S(1)", "einsum_2": "R"}
    plan = fxshard.plan(Net(), (X,), fxshard.Mesh({"tp": 2}), input_layouts="R", output_layouts="R", pins=pins, cache=False)
    return parallelize(Net(), (X,), mesh(), plan, timeout=20.0, **{"compiler": "eager", "without": ["bucket"], **options})


def _flat(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    """The second collective gets its input flattened."""
    node = collectives[1]
    with graph.inserting_before(node):
        node.args = (graph.call_function(torch.ops.aten.view.default, (node.args[0], [-1])), *node.args[1:])


def another_shape() -> None:
    here, there = (rf"rank {i}: all_gather of \({shape}\) float64, 2, over tp" for i, shape in enumerate((r"\d+, \d+", r"\d+,")))
    place = r"where: all_gather of '\w+' over tp \(collective 2 of \d of the forward of program"
    with tampered(_flat):
        model = sharded(debug=True)
        with pytest.raises(RunError, match=rf"different collectives: {here}; {there}(.|\n)*{place}"):
            model(X)


def _skipped(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    """Replaces the last collective by two copies of its input."""
    node = collectives[-1]
    (wait,) = node.users
    with graph.inserting_before(node):
        wait.replace_all_uses_with(graph.call_function(torch.ops.aten.cat.default, ([node.args[0]] * 2,)))
    graph.erase_node(wait)
    graph.erase_node(node)


def one_left_out() -> None:
    with tampered(_skipped):
        model = sharded(debug=True)
        with pytest.raises(RunError, match=r"different collectives: rank 0: all_gather of .*; rank 1: no further collective"):
            model(X)


def the_same_numbers() -> None:
    """FXSHARD_DEBUG turns the checks on. They leave results unchanged, forward and backward, eager and with Inductor."""
    reference = Net()
    reference(X).sum().backward()
    for compiler in ("eager", "inductor"):
        checked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FXSHARD_DEBUG", "1")
            model, check = sharded(compiler=compiler), CollectiveChecks._check
            patch.setattr(
                CollectiveChecks, "_check", lambda self, said, check=check, checked=checked: checked.append(said) or check(self, said)
            )
            model(X).sum().backward()
        for name, parameter in model.named_parameters():
            whole: Tensor = parameter.grad.full_tensor()
            torch.testing.assert_close(whole, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
        (program,) = model.forward.programs
        assert (len(checked), checked.count("no further collective")) == (len(program.collectives) + 2, 2), checked


def errors_of_a_watched_block() -> None:
    """``watching`` passes on an error that its block raises, and restores the timeout of the group."""
    with pytest.raises(KeyError, match="mine"), watching("look something up", timeout=1.0):
        raise KeyError("mine")
    if dist.get_rank() == 1:
        time.sleep(2.0)
    dist.all_reduce(torch.ones(1))


found, test_two_ranks = two_ranks(another_shape, one_left_out, the_same_numbers, errors_of_a_watched_block)
