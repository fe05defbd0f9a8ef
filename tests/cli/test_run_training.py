"""``fxshard export --train --optimizer`` and ``fxshard run --updated-weights``: steps from the command line beside those of torch; what is
refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fxshard.cli import main as cli
from fxshard.cli.arguments.optimizer_text import parse_optimizer
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import OptionError

MODEL = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)

    def forward(self, x, y):
        return (self.down(self.norm(self.up(x)).tanh()) - y).square().mean()

def factory():
    torch.manual_seed(0)
    return Regression().double(), (torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))
"""
OPTIMIZER = "adamw:lr=0.01,betas=(0.8,0.9)"
STEPS = 2


def exported(folder: Path, mesh: str, *options: str) -> str:
    """A step as a file, the batches of ``STEPS`` steps, and, as torch makes them, the losses and what the weights are then."""
    (folder / "model.py").write_text(MODEL)
    given = ["--mesh", mesh, "--train", "--pin", "up.weight=*S(0)" if "," in mesh else "up.weight=S(0)", *options]
    assert cli.main(["export", f"{folder / 'model.py'}:factory", *given, "-o", str(folder / "step.pt2")]) == 0
    spec = importlib.util.spec_from_file_location("model_of_test", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, want = module.factory()[0], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    torch.manual_seed(1)
    for step in range(STEPS):
        batch = {"args[0]": torch.randn(4, 6).double(), "args[1]": torch.randn(4, 3).double()}
        save_file(batch, folder / f"{step}.in.safetensors")
        optimizer.zero_grad()
        loss = model(*batch.values())
        loss.backward()
        optimizer.step()
        want[f"loss {step}"] = loss.detach()
    for name, parameter in model.named_parameters():
        want |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    save_file({**want, **model.state_dict()}, folder / "want.safetensors")
    return str(folder / "step.pt2")


def arguments(folder: Path, step: int) -> list[str]:
    """Of ``fxshard run``, for a step from the weights of the one before."""
    given = ["--inputs", str(folder / f"{step}.in.safetensors"), "-o", str(folder / f"{step}.out.safetensors")]
    before = ["--weights", str(folder / f"{step - 1}.w.safetensors")] if step else []
    return ["run", str(folder / "step.pt2"), *given, *before, "--updated-weights", str(folder / f"{step}.w.safetensors")]


def same(folder: Path, steps: int = STEPS) -> None:
    want, have = load_file(folder / "want.safetensors"), load_file(folder / f"{steps - 1}.w.safetensors")
    have |= {f"loss {step}": load_file(folder / f"{step}.out.safetensors")["outputs"] for step in range(steps)}
    assert have.pop("optimizer.groups.0.lr") == 0.01 and sorted(have) == sorted(want)
    for name, value in want.items():
        torch.testing.assert_close(have[name], value, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"{name}: {said}")


def test_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(tmp_path, "dp=2,tp=2", "--optimizer", OPTIMIZER)
    for step in range(STEPS):
        assert cli.main([*arguments(tmp_path, step), "--simulate"]) == 0
    assert f"wrote {tmp_path / '1.w.safetensors'}" in capsys.readouterr().out
    same(tmp_path)


def test_a_program_without_a_step_has_no_updated_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("nn.BatchNorm1d(9)", "nn.Identity()"))
    given = [f"{tmp_path / 'model.py'}:factory", "--mesh", "dp=1", "-o", str(tmp_path / "step.pt2")]
    assert cli.main(["export", *given, "--optimizer", "sgd"]) == USER_ERROR
    assert "add --train" in capsys.readouterr().err
    assert cli.main(["export", *given, "--train"]) == 0
    save_file({"args[0]": torch.ones(4, 6).double(), "args[1]": torch.ones(4, 3).double()}, tmp_path / "0.in.safetensors")
    assert cli.main([*arguments(tmp_path, 0), "--simulate"]) == USER_ERROR
    assert "the program changes none of its weights" in capsys.readouterr().err and not (tmp_path / "0.w.safetensors").exists()


def test_optimizers_as_text() -> None:
    made = parse_optimizer("sgd:lr=1e-2,momentum=0.9,nesterov=True", True)
    assert made.func is torch.optim.SGD and made.keywords == {"lr": 0.01, "momentum": 0.9, "nesterov": True}
    assert parse_optimizer("adam", True).keywords == {} and parse_optimizer(None, False) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("adamx", "'adamx'; did you mean 'adam'"),
        ("adagrad:lr=1", "cannot hold the step"),
        ("adamw:lr", "have no names"),
        ("adamw:**{'lr': 1}", "have no names"),
        ("adamw:lr=open('x')", "cannot read the options"),
        ("adamw:lr=", "cannot read the options"),
        ("adamw:lr=1).g(", "have no names"),
        ("adamw:lr=0.01,lr=5.0", "give a name twice"),
    ],
)
def test_optimizers_that_cannot_be_read(text: str, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        parse_optimizer(text, True)
