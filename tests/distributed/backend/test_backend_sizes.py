"""The torch.compile backend with changing sizes, on two ranks: the numbers of one device, and no more programs than documented."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
import fxshard.runtime.backend.backend as backend
from examples.llama import Llama
from fxshard.errors import RunError
from tests.distributed.scenarios import two_ranks
from tests.distributed.sizes.test_any_size import Perceptron, mesh

pytestmark = pytest.mark.distributed


def compiled(model: Any, dynamic: bool | None = None, **others: Any) -> Any:
    return torch.compile(model, backend="fxshard", dynamic=dynamic, options={"mesh": mesh(), "compiler": "eager", "cache": False, **others})


def by_rows() -> dict[str, Any]:
    """Options that shard rows, so that a program for even sizes does not serve every number of rows."""
    return {"constraints": [fxshard.Pin("up", "S(0)")]}


@contextmanager
def counted() -> Any:
    """Collects the programs that the backend compiles inside the ``with`` block."""
    made: list[Any] = []
    compile_program = backend.compile_program
    backend.compile_program = lambda bound, *how: made.append(bound.program) or compile_program(bound, *how)
    try:
        yield made
    finally:
        backend.compile_program = compile_program


@contextmanager
def logged() -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("fxshard").removeHandler(handler)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(
    model: Any, single: Any, args: Sequence[Any], parameters: Sequence[Any], *, alone: Sequence[Any] = (), tolerance: float = 1e-9
) -> None:
    """Checks loss and gradients of ``model`` against ``single``, which is called with ``alone`` instead of ``args`` where given."""
    ours, theirs = parameters
    have, want = whole(model(*args)), single(*(alone or args))
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    mine = torch.autograd.grad(have.square().sum(), list(ours.parameters()))
    for grad, other in zip(mine, torch.autograd.grad(want.square().sum(), list(theirs.parameters())), strict=True):
        torch.testing.assert_close(whole(grad), other, rtol=tolerance, atol=tolerance)


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def even_sizes_by_one_program_and_odd_ones_by_another() -> None:
    """Three programs: for the first size, for all even sizes, for all others. Dynamo captures twice."""
    model = Perceptron().double()
    single, sharded = copy.deepcopy(model), compiled(model, **by_rows())
    counters.clear()
    with counted() as made:
        for count, programs in ((4, 1), (6, 2), (8, 2), (2, 2), (20, 2), (7, 3), (5, 3), (11, 3), (3, 3), (6, 3)):
            same(sharded, single, (rows(count),), (model, single))
            assert len(made) == programs, (count, len(made))
        assert counters["stats"]["unique_graphs"] == 2
        assert made[1].collectives and [(one.name, one.unit) for one in made[1].sizes] == [("x_0", 2)]


def dynamic_from_the_first_call() -> None:
    model = Perceptron().double()
    single = copy.deepcopy(model)
    for dynamic in (True, None):
        torch._dynamo.reset()
        sharded, first = compiled(model, dynamic), rows(4)
        if dynamic is None:
            torch._dynamo.mark_dynamic(first, 0)
        with counted() as made:
            for x in (first, *map(rows, (6, 9, 2, 16, 3, 5, 12))):
                same(sharded, single, (x,), (model, single))
        assert len(made) == 1
        same(sharded, single, (rows(1),), (model, single))  # Dynamo captures size 1 separately
    torch._dynamo.reset()
    with counted() as made:
        for count in (4, 6, 4, 8):
            same(compiled(model, False), single, (rows(count),), (model, single))
    assert len(made) == 3 and not any(program.sizes for program in made)


def two(x: Tensor, y: Tensor, factor: int) -> tuple[Any, ...]:
    """Outputs with sizes computed from the rows of both inputs, such as n + 1; views; a number; a size given as an int."""
    z = torch.tanh(torch.cat([x, x[:1]]) @ y.t()) * factor
    return z, z.flatten(), x.view(-1), x.shape[0] + y.shape[0], torch.zeros(factor, x.shape[0])


def shared_sizes_views_and_numbers() -> None:
    sharded = compiled(two, True)
    with counted() as made:
        for n, m, factor in ((4, 6, 2), (6, 4, 2), (5, 7, 2), (8, 3, 2), (3, 8, 2), (8, 3, 3), (4, 5, 3)):
            x, y = torch.randn(n, 8, dtype=torch.float64), torch.randn(m, 8, dtype=torch.float64)
            out = sharded(x, y, factor)
            for have, want in zip(out, two(x, y, factor), strict=True):
                torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
            assert out[2].data_ptr() == x.data_ptr()
    assert len(made) == 2  # one for each factor


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return self.down(hidden)


def several_graphs() -> None:
    model = Broken().double()
    single, sharded = copy.deepcopy(model), compiled(model, True)
    with counted() as made:
        for count in (4, 6, 7, 2, 9, 3, 12, 5):
            same(sharded, single, (rows(count),), (model, single))
    assert len(made) == 2
    with torch.no_grad():
        for count in (4, 9):
            torch.testing.assert_close(sharded(rows(count)), single(rows(count)), rtol=1e-9, atol=1e-9)


def dtensors() -> None:
    """One program serves replicated DTensors of any size. Those sharded on the dynamic dim need a program per size; a log line says so."""
    for placement, programs in ((Replicate(), 1), (Shard(0), 6)):
        torch._dynamo.reset()
        model = Perceptron().double()
        single = copy.deepcopy(model)
        for part in (model.up, model.down):
            for name, parameter in list(part.named_parameters()):
                setattr(part, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh(), [Replicate()])))
        sharded = compiled(model, True)
        with counted() as made, logged() as said:
            for count in (4, 6, 8, 7, 5, 3):
                x = distribute_tensor(rows(count), mesh(), [placement])
                same(sharded, single, (x,), (model, single), alone=(rows(count),))
        assert len(made) == programs, (placement, len(made))
        if mesh().get_rank() == 0:
            assert any("x is a DTensor sharded on such a dim" in line for line in said) == placement.is_shard(), said


def styles_of_torch_at_any_number_of_rows() -> None:
    """What is computed on columns between two styled modules is local, and says nothing about the number of rows."""
    model = Perceptron().double()
    single = copy.deepcopy(model)
    down = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh(), {"up": ColwiseParallel(), "down": down})
    sharded, programs = compiled(model), []
    with counted() as made:
        for count in (4, 6, 5, 9, 3, 8):
            same(sharded, single, (rows(count),), (model, single))
            programs.append(len(made))
    assert programs[2:] == [programs[2]] * 4, programs


def ranks_that_saw_other_sizes() -> None:
    """A size that is dynamic on one rank only stays static, and a log line says so; from then on the ranks agree."""
    model = Perceptron().double()
    single, sharded = copy.deepcopy(model), compiled(model)
    with pytest.raises(RunError, match="the shape of x"):
        sharded(rows(4 + mesh().get_local_rank()))
    with logged() as said:
        same(sharded, single, (rows(4),), (model, single))
    assert mesh().get_rank() or any("the ranks saw different sizes before" in line for line in said), said
    with counted() as made:
        for count in (6, 8, 10):
            same(sharded, single, (rows(count),), (model, single))
    assert len(made) == 1


def shards_of_one_row() -> None:
    """If only one rank's shard has one row, only that rank captures again: the error says so, and what to do helps."""

    device_mesh = mesh()

    def function(x: Tensor) -> Tensor:
        return DTensor.from_local(x, device_mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()

    sharded, wanted = compiled(function), [rows(count) for count in (4, 6, 5, 3)]
    for x in wanted[:3]:
        assert torch.equal(sharded(x), function(x))
    with pytest.raises(RunError, match="a rank whose shard has one row, or none, captures the function again by itself"):
        sharded(wanted[3])
    torch._dynamo.reset()
    sharded = compiled(function, False)
    for x in wanted:
        assert torch.equal(sharded(x), function(x))


def tokens(length: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(0, 64, (2, length), generator=draw), torch.randint(0, 64, (2, length), generator=draw)


def lengths_of_a_llama_through_inductor() -> None:
    """Eight lengths: Dynamo captures twice, and Inductor compiles a forward and a backward each time."""
    torch.manual_seed(3)
    model = Llama.small(layers=1)
    single, sharded = copy.deepcopy(model), compiled(model, compiler="inductor")
    counters.clear()
    found = []
    for length in (8, 12, 16, 9, 7, 20, 3, 8):
        same(sharded, single, tokens(length), (model, single), tolerance=1e-5)
        inductor = counters["inductor"]
        found.append((counters["stats"]["unique_graphs"], sum(inductor[f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass"))))
    assert found[0] == (1, 2) and found[1] == found[-1] == (2, 4), found


found, test_two_ranks = two_ranks(
    even_sizes_by_one_program_and_odd_ones_by_another,
    dynamic_from_the_first_call,
    shared_sizes_views_and_numbers,
    several_graphs,
    dtensors,
    styles_of_torch_at_any_number_of_rows,
    ranks_that_saw_other_sizes,
    shards_of_one_row,
    lengths_of_a_llama_through_inductor,
)
