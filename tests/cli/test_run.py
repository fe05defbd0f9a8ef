"""``fxshard run``: an exported program on tensors from a file; where its weights are; what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import FileError

MODEL = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 9), nn.Linear(9, 8)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x, power=1, mask=None):
        return {"logits": (self.last(self.first(x).relu()) ** power) * mask * self.scale, "sum": x.sum()}

def factory():
    torch.manual_seed(0)
    return Masked().double(), (torch.ones(4, 8, dtype=torch.float64), 2), {"mask": torch.ones(8, dtype=torch.float64)}
"""
CUT = ("--pin", "first.weight=RS(0)", "--pin", "last.weight=S(0)S(1)")


def exported(folder: Path, weights: str, *options: str) -> Path:
    """A program for dp=2,tp=2, inputs beside it and what the model itself computes from them."""
    (folder / "model.py").write_text(MODEL)
    program = folder / f"{weights}.pt2"
    given = ["--mesh", "dp=2,tp=2", *CUT, "--weights", weights, *options]
    assert cli.main(["export", f"{folder / 'model.py'}:factory", *given, "-o", str(program)]) == 0
    torch.manual_seed(1)
    inputs = {"args[0]": torch.randn(4, 8, dtype=torch.float64), "mask": torch.rand(8, dtype=torch.float64)}
    save_file(inputs, folder / "in.safetensors")
    with torch.no_grad():
        want = model(folder)(inputs["args[0]"], 2, mask=inputs["mask"])
    save_file({f"outputs[{name!r}]": value for name, value in want.items()}, folder / "want.safetensors")
    return program


def model(folder: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location("model_of_test", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: nn.Module = module.factory()[0]
    return made


def same(folder: Path) -> None:
    want, have = load_file(folder / "want.safetensors"), load_file(folder / "out.safetensors")
    assert sorted(want) == sorted(have)
    for name, value in want.items():
        torch.testing.assert_close(have[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["inside", "per-rank", "none"])
def test_simulated(tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = exported(tmp_path, weights)
    beside = sorted(p.name for p in tmp_path.glob("*.rank-*"))
    assert len(beside) == (4 if weights == "per-rank" else 0)
    run = ["run", str(program), "--inputs", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors"), "--simulate"]
    if weights == "none":
        assert cli.main(run) == USER_ERROR
        assert "no value for parameter 'first.weight'" in capsys.readouterr().err
        save_file({name: value.contiguous() for name, value in model(tmp_path).state_dict().items()}, tmp_path / "w.safetensors")
        run += ["--weights", str(tmp_path / "w.safetensors")]
    assert cli.main(run) == 0
    assert "outputs['logits']: [4, 8] torch.float64" in capsys.readouterr().out
    same(tmp_path)


def test_a_rank_reads_its_own_file(tmp_path: Path) -> None:
    """Each holds its shards only; a damaged, exchanged or missing one is refused by name."""
    path = exported(tmp_path, "per-rank")
    program = fxshard.load(path)
    assert not program.weights and program.rank_files is not None
    shapes = [program.rank_files.local(program, rank)["first.weight"].shape for rank in range(4)]
    assert shapes == [(5, 8), (4, 8)] * 2
    assert torch.equal(program.whole_weights["last.weight"], model(tmp_path).state_dict()["last.weight"])
    program.save(tmp_path / "again.pt2")
    assert torch.equal(fxshard.load(tmp_path / "again.pt2").weights["first.weight"], program.whole_weights["first.weight"])
    first, second = (tmp_path / f"per-rank.pt2.rank-0000{rank}.safetensors" for rank in range(2))
    first.write_bytes(second.read_bytes())
    with pytest.raises(FileError, match="weights of rank 0 are damaged, or another program's"):
        program.rank_files.local(program, 0)
    first.unlink()
    with pytest.raises(FileError, match="cannot read the weights of rank 0: No such file"):
        _ = program.whole_weights


REFUSED: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"args[0]": torch.ones(4, 8)}, "there is no tensor \"kwargs['mask']\""),
    ({"args[0]": torch.ones(4, 8), "mask": torch.ones(8), "x": torch.ones(1)}, "the program has no input 'x'"),
    ({"args[0]": torch.ones(4, 8), "mask": torch.ones(8), "args[1]": torch.ones(1)}, "has no input 'args[1]'"),
    ({"args[0]": torch.ones(4, 7), "mask": torch.ones(8)}, "args[0] is (4, 7)"),
]


def test_inputs_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, inputs = str(exported(tmp_path, "inside")), tmp_path / "other.safetensors"
    run: list[Any] = ["run", program, "--inputs", str(inputs)]
    for tensors, what in REFUSED:
        save_file(tensors, inputs)
        assert cli.main([*run, "--simulate"]) == USER_ERROR
        assert what in capsys.readouterr().err
    inputs.write_text("no tensors")
    assert cli.main([*run, "--simulate"]) == USER_ERROR
    assert "cannot be read as safetensors" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(run) == USER_ERROR
    assert "torchrun --nproc-per-node 4 " in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    save_file({"args[0]": torch.ones(4, 8), "mask": torch.ones(8)}, inputs)
    assert cli.main(run) == USER_ERROR
    assert "4 ranks; 3 run" in capsys.readouterr().err
