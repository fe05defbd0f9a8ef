"""Guards that depend on the rank, in a file: they load as written, and are refused for another mesh or other sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Max, Min

import fxshard
from fxshard._torch_compat.sizes.symbols import SymbolEnv, symbol_of
from fxshard.archive.sizes import FileSizes, write_guards
from fxshard.errors import FileError
from fxshard.files import parse_json
from fxshard.mesh.mesh import Mesh
from fxshard.shapes import Guard
from fxshard.testing.compare import assert_equal_to_one_device, one_device

N, RANK = (sympy.Symbol(name, integer=True, positive=True) for name in ("s1", "s2"))
GUARD = Guard(Max(0, Min(4, N - 4 * (RANK - 1))) > 0, (("n", N, 1),), "model.py:8", (("rank_on_a", RANK, 3),))
SYMBOL = str(symbol_of(SymbolEnv().symbol("n", 12)))
SIZE = {"name": "n", "symbol": SYMBOL, "places": [["args[0]", 0]], "unit": 1, "example": 12, "least": 1, "most": None, "uneven": True}


def read(mesh: Mesh | None = None, **changed: Any) -> Guard:
    (row,) = write_guards([GUARD])
    text = json.dumps({"size": SIZE, "guard": {**row, **changed}})
    root = parse_json(text.encode(), "program.json")
    sizes = FileSizes([root.get("size", lambda f: f)], mesh or Mesh({"a": 3}))
    return root.get("guard", sizes.guard)


def test_roundtrip() -> None:
    found = read()
    assert str(found) == str(GUARD) and found.ranks == GUARD.ranks
    assert [n for n in range(1, 16) if found.holds({"n": n})] == [9, 10, 11, 12, 13, 14, 15]
    assert "ranks" not in write_guards([Guard(N > 1, (("n", N, 1),), "")])[0]


@pytest.mark.parametrize(
    "changed", [{"ranks": []}, {"ranks": [["rank_on_b", "s2", 3]]}, {"ranks": [["rank_on_a", "s2", 4]]}, {"sizes": []}]
)
def test_guards_that_do_not_match_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(FileError, match="a condition on sizes that the program has"):
        read(**changed)


def test_another_symbol_is_refused() -> None:
    with pytest.raises(FileError, match=f"the symbol of 'n' is {SYMBOL}, not 's0'"):
        FileSizes([parse_json(json.dumps({**SIZE, "symbol": "s0"}).encode(), "program.json")])


def test_another_mesh_is_refused() -> None:
    with pytest.raises(FileError, match="a condition on sizes that the program has"):
        read(Mesh({"a": 4}))


class Rolled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 1) + x.cummax(1)[0] + x.logsumexp(1, keepdim=True)


def test_shards_without_rows_are_served(tmp_path: Path) -> None:
    """torch's kernels branch on whether there are rows, with the same result."""
    args, mesh = (torch.randn(9, 3).double(),), Mesh({"a": 4})
    dims = {"x": {0: "n"}}
    program = fxshard.export(Rolled(), args, mesh, input_layouts="S(0)", output_layouts="S(0)", dynamic_shapes=dims)
    assert program.collectives == ()
    program.save(tmp_path / "m.pt2")
    for rows in (1, 2, 5, 8, 9):
        given = (torch.randn(rows, 3).double(),)
        assert_equal_to_one_device(fxshard.simulate(fxshard.load(tmp_path / "m.pt2"), given), one_device(Rolled(), given, train=False))
