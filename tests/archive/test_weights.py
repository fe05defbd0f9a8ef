"""Weights in a program's file: whole, stored once when tied, memory-mapped; missing, wrong and damaged ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fxshard import archive, files
from fxshard.archive import container
from fxshard.archive.store import load_all
from fxshard.errors import FileError
from tests.archive.hostile import entries, pack
from tests.programs import small_program

WEIGHT = torch.randn(8, 4)
SAFETENSORS = "fxshard/weights.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    archive.save(small_program(), tmp_path / "m.pt2", {"lin.weight": WEIGHT})
    return tmp_path / "m.pt2"


def test_tied_weights_are_stored_once_and_others_not_at_all(tmp_path: Path) -> None:
    archive.save(small_program(), tmp_path / "m.pt2", {"lin.weight": WEIGHT, "head.weight": WEIGHT, "unused": torch.ones(1000)})
    weights = archive.load_weights(tmp_path / "m.pt2")
    assert list(weights) == ["lin.weight"] and torch.equal(weights["lin.weight"], WEIGHT)
    archive.save(small_program(), tmp_path / "m.pt2", {"head.weight": WEIGHT})
    assert torch.equal(archive.load_weights(tmp_path / "m.pt2")["lin.weight"], WEIGHT), "a tied weight is found by its other name"


def test_changing_a_loaded_weight_does_not_change_the_file(path: Path) -> None:
    before = path.read_bytes()
    archive.load_weights(path)["lin.weight"].zero_()
    assert path.read_bytes() == before
    assert torch.equal(archive.load_weights(path)["lin.weight"], WEIGHT)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({}, "no weight 'lin.weight'"),
        ({"lin.weight": torch.ones(4, 8)}, r"the weight is \[4, 8\] of torch.float32, the program needs \[8, 4\]"),
        ({"lin.weight": WEIGHT.double()}, "of torch.float64"),
        ({"lin.weight": WEIGHT.to("meta")}, "on meta and holds no numbers"),
    ],
)
def test_refused_weights(tmp_path: Path, weights: dict[str, torch.Tensor], what: str) -> None:
    with pytest.raises(FileError, match=what) as caught:
        archive.save(small_program(), tmp_path / "m.pt2", weights)
    assert caught.value.where == "lin.weight" and caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_program_without_weights_says_so(tmp_path: Path) -> None:
    archive.save(small_program(), tmp_path / "m.pt2")
    with pytest.raises(FileError, match="holds no weights"):
        archive.load_weights(tmp_path / "m.pt2")


def test_one_changed_bit_is_noticed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.find(WEIGHT.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    archive.load(path)
    with pytest.raises(FileError, match="damaged"):
        archive.load_weights(path)


def _header(change: dict[str, object]) -> bytes:
    described = {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]} | change
    text = json.dumps({"lin.weight": described}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(128)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        _header({"data_offsets": [0, 64]}),
        _header({"data_offsets": [128, 256]}),
        _header({"data_offsets": [-128, 0]}),
        _header({"dtype": "F99"}),
        _header({"shape": [2**62, 2**62]}),
        _header({"pickle": 1}),
    ],
)
def test_invalid_safetensors_are_refused_whatever_the_manifest_says(path: Path, content: bytes) -> None:
    pack(path, entries(path) | {SAFETENSORS: content})
    with pytest.raises(FileError):
        archive.load_weights(path)


def _two(second: tuple[int, int], more: bytes = b"") -> bytes:
    """The weight's 128 bytes, and a second tensor at a place of its own."""
    rows = {"lin.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}
    rows["other"] = {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": list(second)}
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + bytes(128) + more


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (_two((0, 8)), "the weights overlap"),
        (_two((132, 136), bytes(8)), "nothing is said of their byte 128"),
        (_header({}) + b"more", "do not end where the last tensor does"),
        (_two((128, 136), bytes(8)), "a weight 'other', which its program does not read"),
    ],
)
def test_a_file_holds_its_weights_and_nothing_else(path: Path, content: bytes, what: str) -> None:
    pack(path, entries(path) | {SAFETENSORS: content})
    with pytest.raises(FileError, match=what):
        load_all(path)


def test_there_is_a_file_for_each_rank_of_the_mesh(tmp_path: Path) -> None:
    program = small_program()
    ranks = program.mesh.size
    for count in (ranks - 1, ranks + 1):
        archive.save(program, tmp_path / "m.pt2", shards=[{"lin.weight": WEIGHT}] * count)
        with pytest.raises(FileError, match=f"lists the weights of {count} ranks, the program's mesh has {ranks}"):
            archive.load(tmp_path / "m.pt2")
        with pytest.raises(FileError, match=f"none of rank {count}"):
            archive.load_rank(tmp_path / "m.pt2", count)


def test_a_program_that_would_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in ((container, "MAX_BYTES"), (files, "MAX_PARSED"), (container, "MAX_RATIO")):
        with monkeypatch.context() as patched:
            patched.setattr(module, limit, 1)
            with pytest.raises(FileError, match=r"too large for a file: .* absurdly large"):
                archive.save(small_program(), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_unaligned_weights_load(path: Path) -> None:
    """Other zip tools do not align entries. The weights are copied then."""
    text = _header({"data_offsets": [0, 128]})[:-128] + WEIGHT.numpy().tobytes()
    pack(path, entries(path) | {SAFETENSORS: text})
    assert torch.equal(archive.load_weights(path)["lin.weight"], WEIGHT)
