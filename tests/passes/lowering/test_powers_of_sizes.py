"""Powers of sizes in a model: equal to one device, limited to 64 bits only where an operator reads them, and stored in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxshard
from fxshard.errors import FileError, SizesError
from tests.passes.any_size import LinearThen, rows

MESH = fxshard.Mesh({"dp": 2})
POWERS: dict[str, Callable[[int], float]] = {
    "5": lambda n: n**5,
    "a product": lambda n: 3 * n**7 - n,
    "n to the n": lambda n: n**n,
    "negative exponent": lambda n: n**-2,
    "of a float": lambda n: float(n) ** -3.5,
}


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
def test_powers_equal_those_of_one_device(power: Callable[[int], float]) -> None:
    model = LinearThen(lambda y: y * power(y.shape[0]))
    plan = fxshard.plan(model, (rows(8),), MESH, dynamic_shapes=({0: "n"},))
    for count in (8, 1, 5, 12):
        torch.testing.assert_close(fxshard.simulate(model, (rows(count),), plan).outputs, model(rows(count)), rtol=1e-9, atol=0)
        assert plan.at(n=count).objective > 0


def test_a_power_too_large_for_an_operator_is_refused_with_its_line() -> None:
    """7132 ** 5 is the first fifth power beyond 64 bits, for which one device raises OverflowError."""
    model = LinearThen(lambda y: y * y.shape[0] ** 5)
    plan = fxshard.plan(model, (rows(4096),), MESH, dynamic_shapes=({0: "n"},))
    assert fxshard.simulate(model, (rows(7130),), plan).outputs.shape == (7130, 4)
    with pytest.raises(OverflowError):
        model(rows(7132))
    with pytest.raises(SizesError, match=r"n=7132: it does not fit in 64 bits[\s\S]*powers_of_sizes\.py"):
        fxshard.simulate(model, (rows(7132),), plan)
    assert plan.at(n=7132).objective > 0


def stored(function: Callable[[Tensor], Tensor], path: Path) -> fxshard.ExportedProgram:
    fxshard.export(LinearThen(function), (rows(8),), MESH, dynamic_shapes=({0: "n"},)).save(path / "m.pt2")
    return fxshard.load(path / "m.pt2")


@pytest.mark.parametrize("name", ["5", "negative exponent", "of a float"])
def test_powers_in_files(name: str, tmp_path: Path) -> None:
    power = POWERS[name]
    program = stored(lambda y: y * power(y.shape[0]), tmp_path)
    for count in (3, 8):
        want = LinearThen(lambda y: y * power(y.shape[0]))(rows(count))
        torch.testing.assert_close(fxshard.simulate(program, (rows(count),)).outputs, want, rtol=1e-9, atol=0)


def test_powers_that_could_not_be_loaded_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"\*\*9 cannot be stored: a power"):
        stored(lambda y: y * y.shape[0] ** 9, tmp_path)
    assert not list(tmp_path.iterdir())
