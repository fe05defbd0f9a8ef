"""tools/check_imports.py: the imports that it accepts, and those that it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_imports import LAYERS, MAX_LINES, check, main


def violations(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"{found.file}:{found.line}: {found.what}" for found in check(root)]


def accepted(root: Path, name: str, text: str) -> bool:
    return not violations(root, {name: text})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("layout/layouts.py", "from fxshard.errors import LayoutError", "from fxshard.plans.plan_data import OpSpec"),
        ("errors.py", "import re", "import fxshard._torch_compat"),
        ("_torch_compat/sizes/symbols.py", "from fxshard import errors", "from fxshard import layout"),
        ("layout/redistribution.py", "from fxshard.mesh.mesh import Mesh", "from fxshard.plans.sharding_plan import ShardingPlan"),
        ("plans/plan_data.py", "from fxshard.layout import redistribution", "from fxshard.program.sharded_program import ShardedProgram"),
        ("ops/random.py", "from fxshard.errors import FxshardError", "from fxshard.plans.plan_data import OpSpec"),
        ("strategies/engine/engine.py", "from fxshard.ops import dropout", "from fxshard.strategies.linear import matmul"),
        ("strategies/linear/matmul.py", "from fxshard.strategies.engine import registry", "from fxshard.cost import bytes_moved"),
        ("cost/compute.py", "from fxshard.program.sharded_program import ShardedProgram", "from fxshard.passes import PIPELINE"),
        ("solver/problem/tree.py", "from fxshard.solver.problem import problem", "from fxshard.errors import FxshardError"),
        ("solver/bounds/sweeps.py", "from fxshard.solver.problem.model import Model", "from fxshard.solver.search import search"),
        ("passes/trace/trace.py", "from fxshard.passes.trace.fakes import symbols", "from fxshard.passes.annotation import annotate"),
        ("passes/planning/choose.py", "from fxshard.solver import solve", "from fxshard.runtime.simulate import simulate"),
        ("runtime/backend/backend.py", "from fxshard.passes import PIPELINE", "from fxshard.api import plan"),
        ("runtime/compile/compile.py", "from fxshard.runtime.ranks import watchdog", "from fxshard.runtime.module import module"),
        ("inspect/tables.py", "from fxshard.program.sharded_program import ShardedProgram", "from fxshard.passes import PIPELINE"),
        ("api.py", "from fxshard.inspect import tables", "from fxshard.cli.main import main"),
        ("testing/plans.py", "from fxshard.api import plan", "from fxshard.cli.main import main"),
        ("cli/main.py", "from fxshard import parallelize", "from fxshard.__main__ import main"),
        ("__init__.py", "from fxshard.api import plan", "from fxshard.cli.main import main"),
    ],
)
def test_direction(tmp_path: Path, name: str, good: str, bad: str) -> None:
    assert accepted(tmp_path, f"fxshard/{name}", good)
    [found] = violations(tmp_path, {f"fxshard/{name}": bad})
    assert found.startswith(f"fxshard/{name}:1: ")
    assert "against the direction of imports" in found


@pytest.mark.parametrize(
    "text",
    [
        "import fxshard.runtime",
        "import fxshard.runtime.backend.backend as backend",
        "from fxshard import runtime",
        "from ...runtime import backend",
        "from ... import runtime",
        "def f():\n    from fxshard.runtime import backend",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fxshard.runtime import backend",
        "import importlib\nimportlib.import_module('fxshard.runtime')",
    ],
)
def test_direction_holds_in_every_way_to_import(tmp_path: Path, text: str) -> None:
    assert len(violations(tmp_path, {"fxshard/passes/lowering/lower.py": text})) == 1
    assert accepted(tmp_path, "fxshard/passes/lowering/lower.py", text.replace("runtime", "solver"))


def test_relative_imports_inside_a_room(tmp_path: Path) -> None:
    assert accepted(tmp_path, "fxshard/passes/lowering/lower.py", "from . import emit\nfrom .emit import emit_step")
    assert accepted(tmp_path, "fxshard/passes/__init__.py", "from .lowering.lower import lower\nfrom ..solver import solve")
    assert accepted(tmp_path, "fxshard/api.py", "from .passes import lower")
    assert not accepted(tmp_path, "fxshard/layout/layouts.py", "from ..passes import lower")


@pytest.mark.parametrize("text", ["def f(node):\n    return node._schema", "graph._codegen.info()", "x = y[0]._version"])
def test_private_attributes_of_others(tmp_path: Path, text: str) -> None:
    assert accepted(tmp_path, "fxshard/_torch_compat.py", text)
    [found] = violations(tmp_path, {"fxshard/passes/lowering/lower.py": text})
    assert "private attribute" in found


def test_own_private_attributes_and_operators(tmp_path: Path) -> None:
    text = "import torch\naten = torch.ops.aten\nclass A:\n    def f(self):\n        return self._x, aten._softmax, type(self).__name__"
    assert accepted(tmp_path, "fxshard/passes/lowering/lower.py", text)


def test_public_names_are_for_those_above(tmp_path: Path) -> None:
    assert accepted(tmp_path, "fxshard/testing/compare.py", "from fxshard import parallelize")
    assert not accepted(tmp_path, "fxshard/passes/lowering/lower.py", "from fxshard import parallelize")


def test_room_that_the_table_does_not_know(tmp_path: Path) -> None:
    files = {"fxshard/helpers.py": "", "fxshard/layout/layouts.py": "from fxshard.helpers import f"}
    assert violations(tmp_path, files) == ["fxshard/helpers.py:1: fxshard has no package named helpers"]


def test_every_room_has_one_floor() -> None:
    packages = [package for layer in LAYERS for package in layer.split()]
    assert len(packages) == len(set(packages))


def test_files_in_a_circle(tmp_path: Path) -> None:
    files = {
        "fxshard/plans/one.py": "def f():\n    from fxshard.plans.two import g",
        "fxshard/plans/two.py": "from fxshard.plans import three",
        "fxshard/plans/three.py": "from fxshard.plans.one import f\nfrom fxshard.plans.four import h",
        "fxshard/plans/four.py": "import math",
        "fxshard/plans/five.py": "from fxshard.plans.one import f",
    }
    found = violations(tmp_path, files)
    assert [one.partition(".py")[0].rpartition("/")[2] for one in found] == ["one", "three", "two"]
    assert all("in a circle of imports" in one for one in found)
    assert not violations(tmp_path, {"fxshard/plans/three.py": ""})


def test_solver_does_without_torch(tmp_path: Path) -> None:
    assert accepted(tmp_path, "fxshard/solver/problem/tree.py", "import numpy")
    assert not accepted(tmp_path, "fxshard/solver/problem/tree.py", "import torch.fx")


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor",
        "from torch._inductor import config",
        "from torch._inductor.compile_fx import compile_fx",
        "from torch.fx import _pytree",
        "from torch import _C",
        "import torch\nx = torch._dynamo.config.verbose",
        "import torch.nn.functional as F\nF._pad",
        "from torch import fx\ndef f():\n    return fx.graph._Namespace()",
        "from torch.distributed.tensor import Shard\nShard._split_tensor",
        "import torch\ngetattr(torch, '_C')",
        "import torch\ntorch.ops._dtensor.shard_dim_alltoall",
        "import importlib\nimportlib.import_module('torch._inductor')",
    ],
)
def test_private_torch_names(tmp_path: Path, text: str) -> None:
    [found] = violations(tmp_path, {"fxshard/runtime/compile/compile.py": text})
    assert "private torch name torch." in found
    assert found.startswith(f"fxshard/runtime/compile/compile.py:{len(text.splitlines())}: ")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._check(True)",
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops._c10d_functional.all_reduce.default",
        "import torch\ntorch.ops.aten._softmax.default",
        "from torch.fx import Node\ndef f(node: Node): return node.args",
        "class A:\n    def f(self): return self._x",
    ],
)
def test_torch_names_that_are_fine(tmp_path: Path, text: str) -> None:
    assert accepted(tmp_path, "fxshard/runtime/compile/compile.py", text)


def test_private_torch_names_have_one_home(tmp_path: Path) -> None:
    private = "from torch._inductor.compile_fx import compile_fx"
    assert accepted(tmp_path, "fxshard/_torch_compat.py", private)
    assert accepted(tmp_path, "tests/test_compat.py", private)
    assert not accepted(tmp_path, "examples/mlp.py", private)


def test_length_of_files(tmp_path: Path) -> None:
    assert accepted(tmp_path, "tests/test_a.py", "x = 1\n" * MAX_LINES)
    assert violations(tmp_path, {"tests/test_a.py": "x = 1\n" * (MAX_LINES + 1)}) == [
        f"tests/test_a.py:{MAX_LINES + 1}: {MAX_LINES + 1} lines, more than {MAX_LINES}"
    ]


def test_file_that_is_not_python(tmp_path: Path) -> None:
    assert "not Python" in violations(tmp_path, {"fxshard/api.py": "def"})[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fxshard").mkdir()
    assert main([str(tmp_path)]) == 0
    (tmp_path / "fxshard" / "errors.py").write_text("import re\n\nfrom fxshard import api\n")
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "fxshard/errors.py:3: errors imports fxshard.api, against the direction of imports. Remedy: " in printed
    assert main([str(tmp_path / "nowhere")]) == 2
