"""The second size is odd, on two ranks: the program for even sizes is planned, to learn the cuts, and compiled when an even size comes."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from torch import nn

import fxshard.runtime.compile.compile as compiling
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.dynamic_sizes import shapes_of
from tests.distributed.backend import test_backend_sizes as by_backend
from tests.distributed.logged import logged
from tests.distributed.scenarios import two_ranks
from tests.distributed.sizes.test_any_size import Perceptron, made, mesh, pair, rows, same

pytestmark = pytest.mark.distributed


@contextlib.contextmanager
def compiled() -> Iterator[list[ShardedProgram]]:
    """Collects the programs that are compiled inside the ``with`` block."""
    found: list[ShardedProgram] = []
    real = compiling._load_or_compile

    def noted(building: compiling.CompileState, *how: object) -> object:
        found.append(building.program)
        return real(building, *how)

    with mock.patch.object(compiling, "_load_or_compile", noted):
        yield found


def with_parallelize() -> None:
    """A first and an odd second size compile two programs, the next even size a third one, further sizes none."""
    with compiled() as programs, logged(logging.INFO) as lines:
        sharded, single = pair(Perceptron().double(), rows(4), input_layouts="S(0)")
        for count, want in ((4, 1), (7, 2), (5, 2), (6, 3), (11, 3), (8, 3), (4, 3)):
            same(sharded, single, rows(count))
            assert len(programs) == want, (count, len(programs))
    assert made(sharded) == 3
    assert [[one.unit for one in program.sizes] for program in programs] == [[], [1], [2]], "the program for even sizes last"
    if mesh().get_rank() == 0:
        reason = "args_0_0 is 7, shards are even at multiples of 2 only"
        assert [line for line in lines if line.endswith(reason)] == [
            f"the program does not serve this call; it is kept for other calls, and compiled when the first of them comes: {reason}"
        ]
        what = "args[0] (7, 8), and any other sizes of dim 0 of args[0]"
        again = [line for line in lines if line.startswith("planning")]
        assert again == [f"planning again for training: {what}", f"planning once more for training: {what}, odd ones too"]


def planning_again_warns_once() -> None:
    sharded, _ = pair(Perceptron().double(), rows(4), input_layouts="S(0)")
    with logged(logging.WARNING) as lines:
        for count in (4, 7, 5):
            sharded(rows(count)[0])
    again = [line for line in lines if "planning" in line]
    assert len(again) == (0 if mesh().get_rank() else 1) and all("(7, 8)" in line for line in again), lines


def with_the_backend() -> None:
    model = Perceptron().double()
    single, sharded = copy.deepcopy(model), by_backend.compiled(model, **by_backend.by_rows())
    with compiled() as programs, logged(logging.INFO) as lines:
        for count, want in ((4, 1), (7, 2), (5, 2), (6, 3), (11, 3), (8, 3)):
            by_backend.same(sharded, single, (rows(count)[0],), (model, single))
            assert len(programs) == want, (count, len(programs))
    assert mesh().get_rank() or any(
        line.startswith("the program does not serve this call; it is kept for other calls, and compiled when") for line in lines
    ), lines
    assert not any("planning again" in line for line in lines), "for a graph that Dynamo has just captured"


def only_the_refusal_of_a_compiled_program_warns() -> None:
    """If a program was compiled and then refuses a call, its compilation was wasted: a warning. Before compilation it is only info."""
    from fxshard.runtime.calls.dynamic_sizes import refusal_message

    sharded, _ = pair(Perceptron().double(), rows(4), input_layouts="S(0)", dynamic=True)
    sharded(*rows(7))
    (first, *_) = next(iter(sharded.forward.by_size_free_key.values()))
    assert first.shapes == shapes_of(rows(4)) and first.runner.compiled.is_compiled
    assert refusal_message(first, "")[0] == logging.WARNING
    later = copy.copy(first.runner.compiled)
    del vars(later)["artefact"]
    with mock.patch.object(first.runner, "compiled", later):
        assert refusal_message(first, "")[0] == logging.INFO


def each_program_has_a_dump_folder() -> None:
    """No program overwrites the dump of another, not even the one that is compiled later."""
    with TemporaryDirectory() as folder:
        model = nn.Sequential(nn.Linear(8, 10), nn.Tanh()).double()  # used by no other test here: code from the cache has no stages
        sharded, _ = pair(model, rows(4), input_layouts="S(0)", dump=folder)
        for count in (7, 6):
            sharded(*rows(count))
        if mesh().get_rank() == 0:
            found = sorted(path.name for path in Path(folder).iterdir())
            assert found == ["00_train", "01_train", "02_train"], found
            assert all(list(Path(folder, name).glob("*_compile.txt")) for name in found)
    torch.distributed.barrier()


found, test_two_ranks = two_ranks(
    with_parallelize,
    planning_again_warns_once,
    with_the_backend,
    only_the_refusal_of_a_compiled_program_warns,
    each_program_has_a_dump_folder,
)
