"""A program saved and loaded is the same program, without pickle, process group or model; its file is always the same."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard import archive, load, simulate
from fxshard.errors import FileError
from fxshard.layout.layouts import Layout
from fxshard.program.sharded_program import ShardedProgram
from tests.programs import small_program

WEIGHTS = {"lin.weight": torch.arange(32.0).view(8, 4)}


def _same(a: ShardedProgram, b: ShardedProgram) -> None:
    for field in dataclasses.fields(ShardedProgram):
        if field.name != "modules":
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    assert list(a.modules) == list(b.modules)
    for size_class, module in a.modules.items():
        nodes, again = (list(m.graph.nodes) for m in (module, b.modules[size_class]))
        assert [n.format_node() for n in nodes] == [n.format_node() for n in again]
        for node, other in zip(nodes, again, strict=True):
            assert node.meta.get("partitioner_tag") == other.meta.get("partitioner_tag")
            if node.op != "output":
                assert (node.meta["val"].shape, node.meta["val"].dtype) == (other.meta["val"].shape, other.meta["val"].dtype)


@pytest.mark.parametrize("rows", [6, 5], ids=["even", "uneven"])
def test_roundtrip(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = small_program(rows)
    archive.save(program, tmp_path / "m.pt2")

    def no(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, no)
    loaded = archive.load(tmp_path / "m.pt2")
    _same(program, loaded)
    assert loaded.hash == program.hash and len(loaded.modules) == (2 if rows == 5 else 1)


@pytest.mark.parametrize("rows", [6, 5])
def test_a_loaded_program_computes(tmp_path: Path, rows: int) -> None:
    archive.save(small_program(rows), tmp_path / "m.pt2", WEIGHTS)
    loaded, weights = archive.load(tmp_path / "m.pt2"), archive.load_weights(tmp_path / "m.pt2")
    x = torch.randn(rows, 8)
    torch.testing.assert_close(simulate(loaded, (x,), weights=weights).outputs, {"logits": x @ WEIGHTS["lin.weight"]})


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.pt2", "b.pt2"):
        archive.save(small_program(5), tmp_path / name, WEIGHTS)
    assert (tmp_path / "a.pt2").read_bytes() == (tmp_path / "b.pt2").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt2", "b.pt2"], "a temporary file was left behind"


def test_torch_opens_the_file_and_nothing_in_it_is_a_pickle(tmp_path: Path) -> None:
    archive.save(small_program(5), tmp_path / "m.pt2", WEIGHTS)
    files: dict[str, Any] = {"fxshard/plan.json": ""}
    exported = torch.export.load(tmp_path / "m.pt2", extra_files=files)
    targets = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert targets == ["fxshard.einsum.default", "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert files["fxshard/plan.json"].splitlines()[2] == '"format": "fxshard-plan",'
    with zipfile.ZipFile(tmp_path / "m.pt2") as open_archive:
        contents = {name: open_archive.read(name) for name in open_archive.namelist()}
    assert not any(data.startswith(b"\x80") or b"PK\3\4" in data for data in contents.values())
    assert contents["archive/data/sample_inputs/model.pt"] == b""


def test_a_program_with_a_forbidden_operator_is_not_saved(tmp_path: Path) -> None:
    program = small_program()
    (module,) = program.modules.values()
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.target = torch.ops.aten.add_.Tensor
    with pytest.raises(FileError, match=r"aten.add_.Tensor\) cannot be stored"):
        archive.save(program, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pt2").write_text("an older file")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full_disk)
    with pytest.raises(FileError, match="No space left"):
        archive.save(small_program(), tmp_path / "m.pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"] and (tmp_path / "m.pt2").read_text() == "an older file"


def test_a_file_with_inconsistent_parts_is_refused(tmp_path: Path) -> None:
    """Each part is well formed, but the input layouts do not match the shapes in the graph."""
    program = small_program(6)
    layouts = tuple(Layout.replicated(program.mesh.ndim) for _ in program.input_layouts)
    assert layouts != program.input_layouts
    archive.save(dataclasses.replace(program, input_layouts=layouts), tmp_path / "m.pt2", WEIGHTS)
    with pytest.raises(FileError, match=r"does not hold together: .* is .*, not"):
        load(tmp_path / "m.pt2")
