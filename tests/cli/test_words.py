"""``--parallel``, and the stages of ``--pipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.cli import main as cli
from fxshard.cli.arguments.words import WORDS, parse_words
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import OptionError
from fxshard.mesh.mesh import parse_mesh
from fxshard.plans.parallel import AUTO, NAMED, FullyShard, HybridShard, TensorParallel, read_parallel

MODEL = """
import torch
from torch import nn

def training():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.ones(4, 8),)
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:training"


def test_the_words_of_one_axis_are_those_of_python() -> None:
    """hsdp is for two axes, which AXIS=WORD cannot say."""
    assert set(WORDS) == {AUTO, *NAMED} - {"hsdp"}
    with pytest.raises(OptionError, match=r"'fspd' is not a word for an axis; did you mean 'fsdp'\?"):
        parse_words("dp=fspd")


def test_words_are_text_or_objects() -> None:
    mesh = parse_mesh("dp=2,tp=2")
    given = parse_words("dp=fsdp, tp=auto")
    assert given == {"dp": "fsdp", "tp": "auto"}
    assert read_parallel(given, mesh) == {"dp": FullyShard()}
    assert read_parallel({("dp", "tp"): "hsdp"}, mesh) == read_parallel({("dp", "tp"): HybridShard()}, mesh)
    assert read_parallel("tp", parse_mesh("tp=2")) == {"tp": TensorParallel()}
    with pytest.raises(OptionError, match="'fsdq', given for 'dp', is not a word for an axis; did you mean 'fsdp'"):
        read_parallel({"dp": "fsdq"}, mesh)
    given = parse_words("dp_replicate=ddp,dp_shard=fsdp,cp=cp,tp=tp,ep=ep")
    assert read_parallel(given, fxshard.Mesh(dict.fromkeys(given, 2))) == {axis: NAMED[word] for axis, word in given.items()}
    for text in ("fsdp", "dp=", "dp=fsdp,dp=ddp"):
        with pytest.raises(OptionError, match="cannot read --parallel"):
            parse_words(text)


def test_export_takes_words() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.rand(4, 8)
    program = fxshard.export(model, (x,), fxshard.Mesh({"dp": 2}), parallel={"dp": "fsdp"}, cache=False)
    layouts = {end.name: str(layout) for end, layout in zip(program.inputs, program.input_layouts, strict=True)}
    assert layouts == {"0.weight": "S(0)", "0.bias": "S(0)", "args[0]": "S(0)"}
    torch.testing.assert_close(fxshard.simulate(program, (x,)).outputs, model(x).detach())
    plan = fxshard.plan(model, (x,), fxshard.Mesh({"dp": 2}), train=False)
    with pytest.raises(OptionError, match="parallel would be ignored"):
        fxshard.export(model, (x,), fxshard.Mesh({"dp": 2}), plan, parallel={"dp": "fsdp"})


def test_plan_and_export_pass_words_on(factory: str, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["plan", factory, "--mesh", "dp=2", "--parallel", "dp=fsdp", "--no-cache"]) == 0
    assert "S(0)" in capsys.readouterr().out
    out = ["-o", str(tmp_path / "m.pt2")]
    assert cli.main(["export", factory, "--mesh", "dp=2", "--parallel", "dp=fsdp", "--no-cache", *out]) == 0
    assert "S(0)" in capsys.readouterr().out
    assert cli.main(["plan", factory, "--mesh", "dp=2", "--parallel", "tp=tp"]) == USER_ERROR
    assert "the mesh has no axis 'tp'" in capsys.readouterr().err


def test_a_pipeline_is_shown_by_its_stages(factory: str, tmp_path: Path, capsys: Any) -> None:
    asked = ["plan", factory, "--mesh", "pp=2,dp=2", "--pipeline", "pp", "--no-cache"]
    assert cli.main([*asked, "--parallel", "dp=ddp", "--microbatches", "6"]) == 0
    text = capsys.readouterr().out
    assert "2 stages on axis pp, 1F1B" in text and "in flight" in text and "6 microbatches take" in text
    only_plan = (
        ["--explain", "0.weight"],
        ["--regret"],
        ["--regret", "0.2"],
        ["--html", str(tmp_path / "r.html")],
        ["--offload", "optimizer"],
    )
    for given in (*only_plan, ["--mixed-precision", "bfloat16"], ["--gathers", "fp8"]):
        assert cli.main([*asked, *given]) == USER_ERROR
        assert f"{given[0]} would have no effect on a pipeline" in capsys.readouterr().err
    assert cli.main([*asked[:-2], "pq"]) == USER_ERROR
    assert "the mesh has no axis 'pq'" in capsys.readouterr().err
    assert cli.main([*asked[:4], "--microbatches", "6", "--schedule", "GPipe"]) == USER_ERROR
    assert "--microbatches and --schedule would have no effect without a pipeline" in capsys.readouterr().err
