"""Files of programs with dynamic sizes: one file serves every size, and sizes it does not serve and tampered files are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard import archive, runtime
from fxshard.errors import FileError, OptionError, PlanError, RunError, SizesError
from fxshard.program.fields import program_fields
from fxshard.program.sharded_program import ShardedProgram
from fxshard.testing import assert_equal_to_one_device, one_device
from tests.archive.hostile import edited, entries

GRAPH, PROGRAM = "models/model.json", "extra/fxshard/program.json"
BATCH = {"args[0]": {0: torch.export.Dim("batch", max=40)}}


class Perceptron(nn.Sequential):
    """Branches on the number of rows, so that its program serves two or more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] > 1 else x


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def exported(path: Path | None, ranks: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    model = perceptron()
    args = (torch.randn(6, 8).double(),)
    program = fxshard.export(model, args, fxshard.Mesh({"tp": ranks}), input_layouts="S(0)", dynamic_shapes=BATCH, **options)
    if path is not None:
        program.save(path)
    return model, program


def served(path: Path, model: nn.Module, rows: int) -> None:
    args = (torch.randn(rows, 8).double(),)
    assert_equal_to_one_device(fxshard.simulate(fxshard.load(path), args), one_device(model, args, train=False))


@pytest.mark.parametrize("even", [True, False], ids=["even", "any"])
def test_roundtrip(tmp_path: Path, even: bool) -> None:
    _, program = exported(tmp_path / "m.pt2", even=even)
    loaded = fxshard.load(tmp_path / "m.pt2")
    assert loaded.hash == program.hash and loaded.sizes == program.sizes and len(loaded.modules) == 1
    assert [(str(g), g.holds({"batch": 7})) for g in loaded.guards] == [(str(g), g.holds({"batch": 7})) for g in program.guards]
    others = {"modules", "effects", "sizes", "guards", "input_shapes", "output_shapes"}
    for name in {f.name for f in dataclasses.fields(ShardedProgram)} - others:
        assert getattr(loaded, name) == getattr(program, name), name
    assert program_fields(loaded)["inputs"] == program_fields(program)["inputs"]
    for key, module in program.modules.items():
        pairs = zip(module.graph.nodes, loaded.modules[key].graph.nodes, strict=True)
        assert all(a.format_node() == b.format_node() and str(a.meta.get("val")) == str(b.meta.get("val")) for a, b in pairs)


S, RANK = (f"Symbol('{name}', positive=True, integer=True)" for name in ("s26", "s37"))


def test_one_file_serves_every_size(tmp_path: Path) -> None:
    model, _ = exported(tmp_path / "m.pt2")
    for rows in (2, 3, 6, 7, 40):
        served(tmp_path / "m.pt2", model, rows)
    with pytest.raises(SizesError, match="batch is 41, it must be from 1 to 40"):
        served(tmp_path / "m.pt2", model, 41)
    with pytest.raises(SizesError, match=r"takes for granted that .*test_dynamic.py"):
        served(tmp_path / "m.pt2", model, 1)


def test_a_file_for_more_ranks_holds_no_more_graphs(tmp_path: Path) -> None:
    model, program = exported(tmp_path / "m.pt2", 18)
    exported(tmp_path / "two.pt2", 2)
    assert len(program.modules) == 1 and program.sizes[0].uneven
    assert len(entries(tmp_path / "m.pt2")[GRAPH]) < 1.5 * len(entries(tmp_path / "two.pt2")[GRAPH])
    for rows in (2, 17, 37):  # 2 and 17 are fewer than the ranks: some shards are empty
        served(tmp_path / "m.pt2", model, rows)


def test_a_file_for_even_sizes_refuses_odd_ones_by_name(tmp_path: Path) -> None:
    model, _ = exported(tmp_path / "m.pt2", even=True)
    served(tmp_path / "m.pt2", model, 8)
    with pytest.raises(SizesError, match="batch is 7, shards are even at multiples of 2"):
        served(tmp_path / "m.pt2", model, 7)
    with pytest.raises(RunError, match=r"args\[0\] is \(8, 9\)"):
        fxshard.simulate(fxshard.load(tmp_path / "m.pt2"), (torch.randn(8, 9).double(),))


def test_a_program_of_a_given_plan_is_for_even_sizes(tmp_path: Path) -> None:
    model, args = perceptron(), (torch.randn(6, 8).double(),)
    mesh = fxshard.Mesh({"tp": 2})
    plan = fxshard.plan(model, args, mesh, train=False, input_layouts="S(0)", output_layouts="R", dynamic_shapes=BATCH)
    program = fxshard.export(model, args, mesh, plan=plan, dynamic_shapes=BATCH)
    program.save(tmp_path / "m.pt2")
    assert [one.unit for one in fxshard.load(tmp_path / "m.pt2").sizes] == [2]
    served(tmp_path / "m.pt2", model, 10)
    with pytest.raises(PlanError, match="another graph"):
        fxshard.export(model, args, mesh, plan=plan)
    with pytest.raises(OptionError, match="even=True is for dynamic sizes"):
        fxshard.export(model, args, mesh, even=True)


def test_a_program_that_cannot_have_uneven_shards_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = runtime.exported.make_plan

    def make_plan(state: Any, dump: Any) -> Any:
        if any(dim.uneven for dim in state.request.dynamic):
            raise SizesError("a dim is cut unevenly")
        return real(state, dump)

    monkeypatch.setattr(runtime.exported, "make_plan", make_plan)
    _, program = exported(None)
    assert not program.sizes[0].uneven and program.sizes[0].unit == 2
    assert "sizes that the mesh does not cut evenly are not served: a dim is cut unevenly" in caplog.text


def test_the_same_program_gives_the_same_bytes_and_torch_opens_it(tmp_path: Path) -> None:
    for name in ("a.pt2", "b.pt2"):
        exported(tmp_path / name)
    assert (tmp_path / "a.pt2").read_bytes() == (tmp_path / "b.pt2").read_bytes()
    open_archive = torch.export.load(tmp_path / "a.pt2")
    limits = [(int(one.lower), int(one.upper)) for one in open_archive.range_constraints.values()]
    assert limits == [(1, 40), (1, 2)]  # rows, and one plus the rank's index
    assert open_archive.graph_signature.user_inputs[:2] == ("size_0", "size_1")


def test_a_guard_without_a_value_at_a_size_does_not_hold_there(tmp_path: Path) -> None:
    exported(tmp_path / "m.pt2")
    text = f"GreaterThan(FloorDiv(Integer(6), Add({S}, Integer(-6))), Integer(-9))"
    program = fxshard.load(edited(tmp_path / "m.pt2", *_guard(condition=text, sizes=[["batch", "s26", 1]])))
    assert program.refuses({"batch": 8}) is None and "for granted" in str(program.refuses({"batch": 6}))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.weight[: x.shape[0]]


@pytest.mark.parametrize("even", [True, False])
def test_a_table_sliced_by_a_size_with_a_max(tmp_path: Path, even: bool) -> None:
    model, dims = Table().double(), {"x": {0: torch.export.Dim("t", max=16)}}
    layouts = {"input_layouts": "S(0)", "output_layouts": "R"}
    program = fxshard.export(model, (torch.randn(6, 8).double(),), fxshard.Mesh({"tp": 2}), dynamic_shapes=dims, even=even, **layouts)
    program.save(tmp_path / "m.pt2")
    for rows in (4, 6, 16, *(() if even else (5, 1))):
        served(tmp_path / "m.pt2", model, rows)


def _graph(change: Callable[[Any], Any]) -> tuple[str, Callable[[Any], None]]:
    def apply(file: Any) -> None:
        change(file["graph_module"]["graph"])

    return GRAPH, apply


def _first_size(text: str) -> tuple[str, Callable[[Any], None]]:
    """Changes the expression of the first node, which computes a size."""

    def change(graph: Any) -> None:
        name = graph["nodes"][0]["outputs"][0]["as_sym_int"]["as_name"]
        graph["sym_int_values"][name]["as_expr"]["expr_str"] = text

    return _graph(change)


def _guard(**value: Any) -> tuple[str, Callable[[Any], None]]:
    return PROGRAM, lambda p: p["guards"][0].update(value)


def _first(**value: Any) -> tuple[str, Callable[[Any], None]]:
    return PROGRAM, lambda p: p["sizes"][0].update(value)


TAMPERED = [
    (_first_size("__import__('os').system('true')"), "'__import__' is not a function of sizes"),
    (_first_size(f"Mul(Integer(-77), {S})"), r"the file says -77\*s26"),
    (_first_size("Integer(-77)"), "the file says -77"),
    (_first_size("Symbol('s1', integer=True)"), "there is no size 's1'"),
    (_first_size("Pow(" * 40 + S + ", Integer(8))" * 40), "out of bounds"),
    (_graph(lambda g: g["nodes"][0].update(target="_operator.attrgetter")), "not an operator that a program may call"),
    (_graph(lambda g: g["nodes"][0].update(target="_operator.mod")), "the file says|cannot have these"),
    (_graph(lambda g: g["nodes"][0]["inputs"][0].update(arg={"as_string": "x"})), "a size may be computed from sizes only"),
    (_graph(lambda g: g["tensor_values"]["args_0"]["sizes"][0].update(as_expr={"expr_str": S})), "the file says otherwise"),
    (_graph(lambda g: g["inputs"].pop(1)), "does not take all sizes"),
    (_graph(lambda g: g["inputs"].insert(2, g["inputs"][0])), "takes more sizes than the program has"),
    ((PROGRAM, lambda p: p["sizes"].clear()), "there is no size 's26'"),
    ((PROGRAM, lambda p: p["sizes"].append(p["sizes"][0])), "two sizes are called 'batch'"),
    ((PROGRAM, lambda p: p["inputs"][-1]["shape"].__setitem__(0, f"Add(Integer(1), {S})")), "hold together"),
    ((PROGRAM, lambda p: p["inputs"][-1]["shape"].__setitem__(0, f"Add({S}, {RANK})")), "does not depend on the rank"),
    ((PROGRAM, lambda p: p.update(by_rank=False)), "takes more sizes than the program has"),
    (_first(unit=0), "at least 1, found 0"),
    (_first(example=2**50), "out of bounds"),
    (_first(most=0), "at least 1, found 0"),
    (_first(places=[["args[0]", -1]]), "at least 0, found -1"),
    (_guard(condition="open('x')"), "'open' is not a function of sizes"),
    (_guard(condition="Integer(1)"), "a condition on sizes that the program has"),
    (_guard(sizes=[["seq", "s26", 1]]), "a condition on sizes that the program has"),
    (_guard(condition=f"GreaterThan(ModularIndexing({S}, Float('3.0', precision=53), Integer(4)), Integer(0))"), "not a whole number"),
    ((PROGRAM, lambda p: p["inputs"][-1]["shape"].__setitem__(0, f"StrictGreaterThan({S}, Integer(9))")), "a size is a whole number"),
]


@pytest.mark.parametrize(("change", "what"), TAMPERED)
def test_a_tampered_file_is_refused(tmp_path: Path, change: tuple[str, Callable[[Any], None]], what: str) -> None:
    exported(tmp_path / "m.pt2")
    with pytest.raises(FileError, match=what) as caught:
        archive.load(edited(tmp_path / "m.pt2", *change))
    assert str(tmp_path) in str(caught.value.where)
