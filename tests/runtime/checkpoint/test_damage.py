"""A checkpoint is data: a damaged, truncated or foreign file is refused with its reason, and no code in it runs."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fxshard
from fxshard.errors import FileError, OptionError
from fxshard.runtime.checkpoint.json_values import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED = {"folder": {}, "whole.safetensors": {}, "torch": {"format": "dcp"}}


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def run(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(params=SAVED)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fxshard.save_checkpoint(tmp_path / request.param, *run(), extra={"step": 3}, **SAVED[request.param])
    return tmp_path / request.param


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(t for one in optimizer.state_dict()["state"].values() for t in one.values())]


def test_a_changed_byte_is_found_or_changes_nothing(path: Path) -> None:
    """Flips one bit anywhere. torch's folder has only the checksum of a zip file, which torch's reader does not check, so it may load."""
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    draw, want, refused = random.Random(0), state_of(*run()), 0
    for _ in range(60):
        file = draw.choice(files)
        data = file.read_bytes()
        place = draw.randrange(len(data))
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :])
        held = run(1)
        try:
            extra = fxshard.load_checkpoint(path, *held)
        except FileError:
            refused += 1
        else:
            if path.name != "torch":
                assert extra == {"step": 3}
                assert all(torch.equal(a, b) for a, b in zip(want, state_of(*held), strict=True)), (file, place)
        file.write_bytes(data)
    assert refused > (6 if path.name == "torch" else 40)


def test_a_truncated_or_missing_file_is_refused(path: Path) -> None:
    for file in [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]:
        data = file.read_bytes()
        for length in (0, 7, len(data) // 2, len(data) - 2):
            file.write_bytes(data[:length])
            with pytest.raises(FileError):
                fxshard.load_checkpoint(path, *run())
        file.unlink()
        with pytest.raises(FileError):
            fxshard.load_checkpoint(path, *run())
        file.write_bytes(data)
    fxshard.load_checkpoint(path, *run())


@pytest.mark.parametrize("where", ["metadata", "values", "tensor", "torchs reader"])
def test_no_code_in_a_file_runs(where: str, tmp_path: Path) -> None:
    """A hostile pickle in each part of torch's folder. torch's own reader runs it, which shows that the test can fail."""
    ran = tmp_path / "ran"
    model, _ = run()
    state: dict[str, Any] = {"model": model.state_dict()}
    if where == "values":
        state["optim"] = {"param_groups": Hostile(ran)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = tmp_path / ".metadata"
    if where in ("metadata", "torchs reader"):
        metadata.write_bytes(pickle.dumps([Hostile(ran), pickle.loads(metadata.read_bytes())]))
    if where == "tensor":
        (file,) = tmp_path.glob("*.distcp")
        torch.save(Hostile(ran), tmp_path / "evil")
        evil = (tmp_path / "evil").read_bytes()
        file.write_bytes(evil + file.read_bytes()[len(evil) :])
        held = pickle.loads(metadata.read_bytes())
        for place in held.storage_data.values():
            place.offset, place.length = 0, len(evil)
        metadata.write_bytes(pickle.dumps(held))
    if where == "torchs reader":
        with pytest.raises(dcp.CheckpointException):
            dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        assert ran.exists()
        return
    with pytest.raises(FileError):
        fxshard.load_checkpoint(tmp_path, model, run()[1] if where == "values" else None)
    assert not ran.exists()


def _paths_out(folder: Path) -> None:
    held = pickle.loads((folder / ".metadata").read_bytes())
    for place in held.storage_data.values():
        place.relative_path = "../elsewhere/secret"
    (folder / ".metadata").write_bytes(pickle.dumps(held))


def _zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "index.json", "w") as file:
        file.writestr("data.pkl", pickle.dumps(1))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_paths_out, "is at '../elsewhere/secret'"),
        (_zip, "not text|not JSON"),
        (lambda folder: (folder / "index.json").write_text('{"format": "another"}'), "not a fxshard checkpoint"),
        (lambda folder: (folder / "index.json").write_text('{"format": "fxshard-checkpoint", "version": 9}'), "version 9"),
        (lambda folder: (folder / ".metadata").unlink(), "no finished checkpoint"),
    ],
)
def test_foreign_files_are_refused(spoil: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    dcp.save({"model": run()[0].state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    spoil(tmp_path)
    with pytest.raises(FileError, match=said):
        fxshard.load_checkpoint(tmp_path, run()[0])


def test_a_checkpoint_of_another_model_is_refused(path: Path) -> None:
    model, _ = run()
    for other, said in (
        (nn.Sequential(nn.Linear(3, 5)), "and the model lacks, '1.bias' and"),
        (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2), nn.Linear(1, 1)), "lacks '3.bias' and 1 others"),
        (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double(), "torch.float32 in the checkpoint"),
    ):
        with pytest.raises(FileError, match=said):
            fxshard.load_checkpoint(path, other)
    for other_optimizer, said in (
        (torch.optim.Adam([{"params": [p]} for p in model.parameters()]), "6 groups of parameters, in the checkpoint it has 1"),
        (torch.optim.Adam(list(model.parameters())[1:]), "differs from the checkpoint's in '0.weight'"),
    ):
        with pytest.raises(FileError, match=said):
            fxshard.load_checkpoint(path, model, other_optimizer)
    with pytest.raises(OptionError, match="make the optimiser after"):
        fxshard.load_checkpoint(path, model, torch.optim.SGD(run()[0].parameters(), lr=1.0))


def test_plain_safetensors_files_load_as_weights(tmp_path: Path) -> None:
    model, other = run()[0], run(1)[0]
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    assert fxshard.load_checkpoint(tmp_path / "weights.safetensors", other) is None
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    with pytest.raises(FileError, match="no optimiser's state"):
        fxshard.load_checkpoint(tmp_path / "weights.safetensors", *run())


def test_extra_values_survive_encoding() -> None:
    value = {"a": (1, [2.5, float("inf"), None, True]), 3: {"$b": b"\0x"}, "t": torch.arange(3), (1, "k"): "text", "big": 2**70}
    tensors: dict[str, torch.Tensor] = {}
    back = decode(encode(value, "extra", tensors), tensors.__getitem__, "here")
    assert back.keys() == value.keys()
    assert torch.equal(back.pop("t"), torch.arange(3))
    assert repr(back) == repr({k: v for k, v in value.items() if k != "t"})
    with pytest.raises(OptionError, match="extra/a/1 is a Generator, which a checkpoint cannot hold"):
        encode({"a": [1, torch.Generator()]}, "extra", {})
